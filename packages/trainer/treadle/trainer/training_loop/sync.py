"""The synchronous schedule: the GRPO loop, one step after another.

Each step: rollout, reward, advantage, update, weight sync, validation, checkpoint.

Invariant: step s samples from exactly the weights after step s - 1, so every token is on-policy.
Trainer and servers take turns; nothing of step s + 1 begins before step s is logged. A trainer
that is killed at any point resumes from the latest checkpoint, and repeats what came after it with
the same rows and the same seeds.
"""

from treadle.trainer.report import rollout_metrics
from treadle.trainer.training_loop.context import Timer, TrainingContext
from treadle.trainer.training_loop.groups import StepBatch, make_batch
from treadle.trainer.training_loop.update_metrics import update_metrics
from treadle.trainer.training_loop.validation import validate

__all__ = ["run_sync"]


async def run_sync(context: TrainingContext, *, first_step: int) -> None:
    """Trains steps `first_step` to `context.total_steps`.

    Raises:
        NoGroupLeftError: a step gave nothing to train on.
        NoServerLeftError: no rollout server is left.
        PolicyError: a policy rank failed, or an update left a policy that is not finite.
        WeightSyncError: no server takes new weights.
        RunDirectoryError: a checkpoint cannot be written.
    """
    if first_step == 1 and context.val and context.config.schedule.val_before_train:
        timer = Timer()
        metrics = await validate(context, step=0, timer=timer)
        await context.step_done(0, {**metrics, **context.servers.take_metrics(), **timer.seconds})
    for step in range(first_step, context.total_steps + 1):
        await _train_step(context, step)


async def _train_step(context: TrainingContext, step: int) -> None:
    config, timer = context.config, Timer()

    # Rollout and reward: each trajectory is scored as soon as it ends.
    with timer.phase("rollout"):
        trajectories = await context.sample("train", step, context.train_tasks(step))

    # Advantage: each trajectory is compared with the others of its row.
    batch = make_batch(
        trajectories, norm_by_std=config.algorithm.norm_by_std, version=context.version
    )
    _report_failures(context, step, batch)

    # Update: servers that share devices with the policy lend it their memory until the weight sync.
    if config.rollout.release_memory:
        with timer.phase("release"):
            await context.release_memory()
    with timer.phase("train"):
        stats = await context.update_policy(step, batch.sequences)
    if skipped := sum(update.skipped for update in stats.steps):
        context.note(
            step,
            f"{skipped} of {len(stats.steps)} updates were skipped, because their gradient was not "
            "finite",
        )

    # Weight sync: from here on the servers sample from version `step`.
    with timer.phase("sync"):
        sync_metrics = await context.sync_weights(step)
    metrics = {
        **rollout_metrics(trajectories),
        **batch.metrics(),
        **update_metrics(stats),
        "weights/version": float(context.version),
        **sync_metrics,
        "data/epoch": float(context.order.epoch(step)),
    }

    # Validation
    last = step == context.total_steps
    if context.val and _due(config.schedule.val_every, step, or_now=last):
        metrics |= await validate(context, step=step, timer=timer)
    metrics |= context.servers.take_metrics()

    # Checkpoint: it carries the metrics, so that a resumed run can restore this step's line.
    schedule = config.schedule
    at_end = last and schedule.save_last
    if at_end or _due(schedule.save_every, step):
        with_hf = schedule.save_hf == "every" or (last and schedule.save_hf == "last")
        with timer.phase("save"):
            await context.save(step, {**metrics, **timer.metrics()}, with_hf=with_hf)
    await context.step_done(step, {**metrics, **timer.metrics()})


def _due(every: int | None, step: int, *, or_now: bool = False) -> bool:
    return every is not None and (or_now or step % every == 0)


def _report_failures(context: TrainingContext, step: int, batch: StepBatch) -> None:
    if not batch.num_failed:
        return
    text = (
        f"{batch.num_failed} trajectories failed and are left out, with them "
        f"{batch.num_dropped_groups} of {batch.num_groups} groups"
    )
    context.note(step, "\n  ".join([text, *batch.causes]))
