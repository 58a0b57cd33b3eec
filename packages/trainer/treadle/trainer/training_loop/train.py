"""Training: from a configuration to a finished run directory.

Invariant: when `run_training` returns or raises, every process that it started has ended, and the
run directory holds a state from which the same call resumes. `check_run` has found the errors of
the user's files.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from treadle.trainer.model_source import with_local_model
from treadle.trainer.preflight import CheckedRun
from treadle.trainer.report import Summary, read_metrics, summarize
from treadle.trainer.rollout.server_security import forget_own_token
from treadle.trainer.training_loop.build_context import build_context
from treadle.trainer.training_loop.run_record import open_run
from treadle.trainer.training_loop.schedules.run import run_schedule

__all__ = ["run_training"]


async def run_training(run: CheckedRun, *, losses: Sequence[str] = ()) -> Summary:
    """Trains to the end of the configuration; returns a summary.

    A run that began in the run's directory is resumed.

    Raises:
        SetupError: The model's weights cannot be fetched.
        RunDirectoryError: The directory is in use, holds another run, or cannot be written.
        Exception: See `run_schedule` and `build_context`.
    """
    config = await asyncio.to_thread(with_local_model, run.config)
    async with open_run(
        run.config,
        run.run_dir,
        total_steps=run.plan.total_steps,
        plan=run.plan.text(),
        losses=losses,
    ) as opened:
        if opened.has_steps:
            if run.own.on_step is not None:
                opened.record.call(run.own.on_step)
            async with build_context(replace(run, config=config), opened) as context:
                await run_schedule(context, first_step=opened.resume.first_step)
        else:
            forget_own_token(run.run_dir)
    return summarize(await asyncio.to_thread(read_metrics, run.run_dir / "metrics.jsonl"))
