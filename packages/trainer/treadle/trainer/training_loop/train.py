"""Training: from a configuration to a finished run directory.

Invariant: when `run_training` returns or raises, every process that it started has ended, and the
run directory holds a state from which the same call resumes. `check_run` has found the errors of
the user's files.
"""

import asyncio
from collections.abc import Sequence

from treadle.trainer.checkpoint.begin_or_resume import (
    check_steps_left,
    find_resume_point,
    open_metrics,
)
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    Checkpoints,
    RunDirectory,
)
from treadle.trainer.launch.resuming import loss_notes
from treadle.trainer.loggers.loggers import open_loggers
from treadle.trainer.model_source import with_local_model
from treadle.trainer.preflight import CheckedRun
from treadle.trainer.report import (
    Pace,
    Summary,
    final_numbers,
    live_report,
    open_progress,
    read_metrics,
    summarize,
)
from treadle.trainer.report.prometheus import serve_run_metrics
from treadle.trainer.report.terminal.logged_progress import LoggedProgress
from treadle.trainer.report.terminal.measured_progress import MeasuredProgress
from treadle.trainer.tracing.run_tracing import run_tracing
from treadle.trainer.training_loop.build_context import build_context
from treadle.trainer.training_loop.run_log import run_log
from treadle.trainer.training_loop.schedules.run import run_schedule

__all__ = ["run_training"]


async def run_training(run: CheckedRun, *, losses: Sequence[str] = ()) -> Summary:
    """Trains to the end of the configuration; returns a summary.

    A run that began in the run's directory is resumed.

    Args:
        losses: What earlier attempts of this process lost, in order (see `run_resuming`).

    Raises:
        SetupError: The model's weights cannot be fetched.
        RunDirectoryError: The directory is in use, holds another run, or cannot be written.
        Exception: See `run_schedule` and `build_context`.
    """
    given, run_dir, plan = run.config, run.run_dir, run.plan
    config = await asyncio.to_thread(with_local_model, given)
    with RunDirectory(run_dir) as directory:
        checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep=config.schedule.keep_checkpoints)
        resume = await asyncio.to_thread(find_resume_point, directory, checkpoints, given)
        check_steps_left(resume, plan.total_steps)
        if resume.set_back:
            checkpoints.set_back(resume.first_step - 1)
        directory.write_config(given.model_dump(mode="json"))
        first_step = resume.first_step
        with (
            open_progress(
                total_steps=plan.total_steps,
                first_step=first_step,
                pace=Pace.of(config.schedule, total_steps=plan.total_steps),
            ) as display,
            run_log(run_dir / "logs" / "trainer.log", display),
            open_metrics(run_dir, resume) as metrics_log,
            serve_run_metrics(config.run) as (run_metrics, metrics_url),
        ):
            logged = LoggedProgress(display, total_steps=plan.total_steps)
            progress = MeasuredProgress(logged, run_metrics)
            progress.note(f"run directory  {run_dir}\n{plan.text()}")
            if metrics_url is not None:
                progress.note(f"metrics for Prometheus  {metrics_url}")
            for note in resume.notes:
                progress.note(note)
            if first_step <= plan.total_steps:
                async with (
                    run_tracing(config, run_dir, progress.note),
                    live_report(
                        run_dir, pace=Pace.of(config.schedule, total_steps=plan.total_steps)
                    ) as report,
                    open_loggers(
                        given,
                        run_dir,
                        resumed_after=resume.after,
                        summary=lambda: final_numbers(read_metrics(run_dir / "metrics.jsonl")),
                    ) as loggers,
                    build_context(
                        config,
                        run.inputs,
                        own=run.own,
                        plan=plan,
                        run_dir=run_dir,
                        resume=resume,
                        checkpoints=checkpoints,
                        metrics_log=metrics_log,
                        loggers=loggers,
                        progress=progress,
                        run_metrics=run_metrics,
                        report=report,
                    ) as context,
                ):
                    context.resumes = len(losses)
                    for note in loss_notes(losses, after=resume.after):
                        context.note(first_step - 1, note)
                    await run_schedule(context, first_step=first_step)
            else:
                # The last trainer may have died before it recorded the end.
                async with live_report(run_dir):
                    progress.note(f"nothing to train: step {plan.total_steps} has been reached")
        return summarize(await asyncio.to_thread(read_metrics, run_dir / "metrics.jsonl"))
