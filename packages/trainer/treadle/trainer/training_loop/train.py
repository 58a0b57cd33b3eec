"""Training: from a configuration to a finished run directory.

Invariant: when `run_training` returns or raises, every process that it started has ended, and the
run directory holds a state from which the same call resumes. All errors in the user's files are
found before the first step.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.checkpoint.resume_check import compare
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    Checkpoints,
    RunDirectory,
    RunDirectoryError,
)
from treadle.trainer.config.schema import Config
from treadle.trainer.data import check_rows
from treadle.trainer.data.load_data import Rows
from treadle.trainer.launch.environment import cpu_count
from treadle.trainer.model_source import with_local_model
from treadle.trainer.own_code import NOTHING, OwnCode
from treadle.trainer.plan import make_plan
from treadle.trainer.report import (
    Summary,
    live_report,
    open_progress,
    read_metrics,
    summarize,
)
from treadle.trainer.report.logged_progress import LoggedProgress
from treadle.trainer.rollout.loops_from_config import prompt_rules
from treadle.trainer.rollout.server_process import check_server_command
from treadle.trainer.training_loop.build_context import build_context
from treadle.trainer.training_loop.run_log import run_log, run_tracing
from treadle.trainer.training_loop.sync import run_sync

__all__ = ["run_training"]


async def run_training(
    config: Config, rows: Rows, run_dir: Path, own: OwnCode = NOTHING
) -> Summary:
    """Trains to the end of the configuration; returns a summary.

    Args:
        config: The run's configuration.
        rows: From `read_all_rows`.
        run_dir: Where everything is written; a run that began there is resumed.
        own: The user's objects beside the configuration.

    Raises:
        DataError: a row names something that does not exist.
        ConfigError: the engine's environment does not exist.
        SetupError: the configuration names something that does not exist.
        RunDirectoryError: the directory is in use, holds another run, or cannot be written.
        Exception: see `run_sync` and `build_context`.
    """
    given = config
    config = await asyncio.to_thread(with_local_model, given)
    rules = prompt_rules(config, own)
    check_rows(rows.train, split="train", rules=rules)
    check_rows(rows.val, split="val", rules=rules)
    plan = make_plan(
        config, num_train_rows=len(rows.train), num_val_rows=len(rows.val), cpus=cpu_count()
    )
    check_server_command(config)
    with RunDirectory(run_dir) as directory:
        checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep=config.schedule.keep_checkpoints)
        changes = _begin_or_resume(directory, given)
        begun = directory.holds_run
        checkpoint = checkpoints.latest()
        if begun and checkpoint is None and config.schedule.save_every is None:
            raise RunDirectoryError(
                f"run.dir={run_dir} holds a run that kept no checkpoint to go on from "
                "(schedule.save_every=null): choose another directory, or remove this one"
            )
        directory.write_config(given.model_dump(mode="json"))
        first_step = checkpoint.step + 1 if checkpoint is not None else 1
        with (
            open_progress(total_steps=plan.total_steps, first_step=first_step) as display,
            run_log(run_dir / "logs" / "trainer.log", display),
            run_tracing(config, run_dir),
        ):
            progress = LoggedProgress(display, total_steps=plan.total_steps)
            progress.note(f"run directory  {run_dir}\n{plan.text()}")
            for change in changes:
                progress.note(f"changed since the run began: {change}")
            if checkpoint is not None:
                progress.note(f"resuming after step {checkpoint.step}")
            elif begun:
                progress.note("no checkpoint was reached before: beginning again")
            if first_step <= plan.total_steps:
                async with (
                    live_report(run_dir) as report,
                    build_context(
                        config,
                        rows,
                        rules=rules,
                        own=own,
                        plan=plan,
                        run_dir=run_dir,
                        begun=begun,
                        checkpoints=checkpoints,
                        checkpoint=checkpoint,
                        progress=progress,
                        report=report,
                    ) as context,
                ):
                    await run_sync(context, first_step=first_step)
            else:
                async with live_report(run_dir):  # whatever the last trainer said of its end
                    progress.note(f"nothing to train: step {plan.total_steps} has been reached")
        return summarize(await asyncio.to_thread(read_metrics, run_dir / "metrics.jsonl"))


def _begin_or_resume(directory: RunDirectory, config: Config) -> Sequence[str]:
    """Refuses a directory of another run; returns the settings that have changed."""
    if not directory.holds_run:
        return []
    if config.run.resume == "never":
        raise RunDirectoryError(
            f"run.dir={directory.path} already holds a run and run.resume=never: choose another "
            "directory, or set run.resume=auto to go on with it"
        )
    changes = compare(directory.read_config(), config.model_dump(mode="json"))
    if changes.breaking:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds another run: {'; '.join(changes.breaking)}. "
            "Choose another directory, or set what the run began with"
        )
    return changes.allowed
