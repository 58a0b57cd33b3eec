"""The synchronous schedule: the training loop, one step after another.

Invariant: step s samples from exactly the weights after step s - 1, so every token is on-policy,
except in groups that dynamic sampling kept from the step before.
Trainer and servers take turns; nothing of step s + 1 begins before step s is logged. A trainer
that is killed at any point resumes from the latest checkpoint, and repeats what came after it with
the same rows and the same seeds.
"""

import asyncio

from treadle.trainer.rollout.outages import OutageError
from treadle.trainer.training_loop.context import Timer, TrainingContext
from treadle.trainer.training_loop.gather import gather
from treadle.trainer.training_loop.interruption import finished_first
from treadle.trainer.training_loop.schedules.step import (
    save_interrupted,
    steps_of,
    train_step,
    validate_before_training,
)

__all__ = ["run_sync"]


async def run_sync(context: TrainingContext, *, first_step: int) -> None:
    """Trains steps `first_step` to `context.total_steps`.

    Raises:
        AdvantageError: The estimator failed.
        NoGroupLeftError: A step gave nothing to train on.
        NoServerLeftError: No rollout server is left.
        SetupError: A restarted server does not fit.
        OutageError: A tool or another thing that trajectories need is down.
        PolicyError: A policy rank failed, or an update left a policy or a critic that is not
            finite.
        WeightSyncError: No server takes new weights.
        RunDirectoryError: A checkpoint cannot be written.
        OSError: The disk is full or gone.
    """
    await validate_before_training(context, first_step=first_step)
    for step in steps_of(context, first_step):
        timer = Timer()
        saves = context.config.schedule.saves(step, last=step == context.total_steps)
        # Rollout and reward: each trajectory is scored as soon as it ends.
        try:
            with timer.phase("rollout"):
                found = await gather(context, step, keep_surplus=not saves)
            await finished_first(train_step(context, step, found, timer), say=context.record.show)
        except (asyncio.CancelledError, OutageError):
            await save_interrupted(context)
            raise
