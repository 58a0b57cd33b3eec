"""The record of a run: what happens goes to everything that keeps it or shows it.

Events: a line, a phase, a note about a step, a step with its metrics, an alert that these raise,
trajectories that were sampled or validated, and the end. The files of the run directory, the
loggers, Prometheus, the console and the report each subscribe to the events that they take.

Invariant: subscribers are called in the order in which they subscribed; the files come first, so
that nothing is shown that a resume would not find.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from treadle.agent_loop import Trajectory
from treadle.tracing import FinishedSpan
from treadle.trainer.checkpoint.begin_or_resume import (
    ResumePoint,
    check_steps_left,
    find_resume_point,
    open_metrics,
)
from treadle.trainer.checkpoint.run_directory import CHECKPOINTS, Checkpoints, RunDirectory
from treadle.trainer.config.schema import Config, RunDirConfig
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.launch.resuming import loss_notes
from treadle.trainer.loggers.generations import generations
from treadle.trainer.loggers.loggers import Loggers, open_loggers
from treadle.trainer.own_code import OnStep
from treadle.trainer.report import (
    AlertLog,
    LiveReport,
    MetricsLog,
    NotesLog,
    Pace,
    Progress,
    TrajectoryLog,
    final_numbers,
    live_report,
    open_progress,
    read_metrics,
)
from treadle.trainer.report.generation_files import write_generations
from treadle.trainer.report.metrics import Record
from treadle.trainer.report.prometheus import RunMetrics, serve_run_metrics
from treadle.trainer.report.terminal.progress import step_line
from treadle.trainer.report.trajectories import Decode, Phase
from treadle.trainer.report.warning_signs import Alert, Watch
from treadle.trainer.tracing.run_tracing import run_tracing
from treadle.trainer.training_loop.first_of_kind import FirstOfKind
from treadle.trainer.training_loop.groups import StepBatch
from treadle.trainer.training_loop.run_log import run_log
from treadle.trainer.training_loop.trajectory_store import TrajectoryStore

__all__ = ["OpenRun", "RunRecord", "Sampled", "open_run"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The trajectories of some tasks, with what was traced meanwhile.

    Attributes:
        trajectories: One per task, in the order of the tasks.
    """

    trajectories: Sequence[Trajectory]
    spans: Sequence[FinishedSpan]


class RunRecord:
    """Gives each event of a run to its subscribers.

    Args:
        total_steps: The last step; None: an evaluation, whose notes name no step.

    Attributes:
        busy: By name of each server and rank, the share of the last step in which it worked.
        resumes: How often this process resumed the run by itself (see `run_resuming`).
    """

    trajectory_log: TrajectoryLog
    trajectory_store: TrajectoryStore
    _decode: Decode
    _run: RunDirConfig

    def __init__(
        self, display: Progress, metrics: RunMetrics, *, total_steps: int | None, resumes: int = 0
    ) -> None:
        self.on_note: list[Callable[[int, str], None]] = []
        self.on_step: list[Callable[[int, Record], Awaitable[None] | None]] = []
        self.on_alert: list[Callable[[int, Alert], None]] = []
        self.loggers = Loggers()
        self.busy: Mapping[str, float] = {}
        self.resumes = resumes
        self._display = display
        self._metrics = metrics
        self._total = total_steps
        self._first_of_kind = FirstOfKind()

    def show(self, text: str) -> None:
        """Shows and logs a line."""
        self._display.note(text)
        _log.info("%s", text)

    @contextmanager
    def phase(self, name: str, *, total: int | None = None) -> Iterator[None]:
        """Shows and measures a phase.

        Args:
            total: Number of `advance` calls to expect; None: there are none.
        """
        self._metrics.begin_phase(name, total=total or 0)
        try:
            with self._display.phase(name, total=total):
                yield
        finally:
            self._metrics.end_phase()

    def advance(self, count: int = 1) -> None:
        """Shows and counts that parts of the phase are done."""
        self._display.advance(count)
        self._metrics.advance(count)

    def note(self, step: int, text: str) -> None:
        """Takes a note about a step."""
        self.show(text if self._total is None else f"step {step}: {text}")
        for take in self.on_note:
            take(step, text)

    def firsts(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Notes the first failure and the first finding of each kind."""
        for text in self._first_of_kind.take(trajectories):
            self.note(step, text)

    async def step(self, step: int, metrics: Record) -> None:
        """Takes the end of a step; returns when the user's function, if there is one, has."""
        for take in self.on_step:
            if (taken := take(step, metrics)) is not None:
                await taken

    def show_step(self, step: int, metrics: Record) -> None:
        """Shows and logs the line of a step, and gives its metrics to Prometheus."""
        self._display.step_done(step, metrics)
        _log.info("%s", step_line(step, self._total or 0, metrics))
        self._metrics.step_done(step, metrics)

    def raise_alerts(self, watch: Watch) -> None:
        """Subscribes the alerts to the steps that come."""

        def take(step: int, metrics: Record) -> None:
            if step > 0:
                for alert in watch.step(metrics):
                    self.note(step, alert.text)
                    for each in self.on_alert:
                        each(step, alert)
                self._metrics.set_alerts(watch.active)

        self.on_step.append(take)

    def call(self, function: OnStep) -> None:
        """Subscribes a function of the user's, which runs in a thread if it is not async."""

        async def take(step: int, metrics: Record) -> None:
            if inspect.iscoroutinefunction(function):
                await function(step, metrics)
            else:
                await asyncio.to_thread(function, step, metrics)

        self.on_step.append(take)

    @asynccontextmanager
    async def keep_trajectories(
        self, run: RunDirConfig, run_dir: Path, *, decode: Decode, resume_after: int | None = None
    ) -> AsyncIterator[None]:
        """Keeps in files what this block samples.

        Args:
            resume_after: See `MetricsLog`; None begins new files.

        Raises:
            OSError: They cannot be written.
        """
        self._run, self._decode = run, decode
        store = TrajectoryStore(
            run_dir, decode=decode, max_bytes=run.trajectories_max_bytes, resume_after=resume_after
        )
        path = run_dir / "trajectories.jsonl"
        with TrajectoryLog(path, decode=decode, resume_after=resume_after) as self.trajectory_log:
            async with store as self.trajectory_store:
                yield

    async def sampled(self, step: int, sampled: Sampled, batch: StepBatch | None) -> None:
        """Logs some of the trajectories of a step; all of them wait for `trajectory_store.write`.

        Args:
            batch: The step's training batch; None: there is none.
        """
        limit = self._run.trajectories_per_step
        self.trajectory_log.append(
            step,
            sampled.trajectories,
            phase="train",
            limit=limit,
            advantages=None if batch is None else batch.advantages_of(sampled.trajectories),
            spans=sampled.spans,
        )
        self.hold(step, sampled, phase="train", limit=limit, batch=batch)
        await self._write_generations(self._run.rollout_data_dir, step, sampled)

    async def validated(self, step: int, sampled: Sampled) -> None:
        """Logs some of the trajectories of a validation, and begins to write all of them.

        Raises:
            OSError: Those of the step before could not be written.
        """
        limit = self._run.val_trajectories
        self.trajectory_log.append(
            step, sampled.trajectories, phase="val", limit=limit, spans=sampled.spans
        )
        self.hold(step, sampled, phase="val", limit=limit)
        await self.trajectory_store.write()
        if limit:
            self.loggers.table(step, generations(sampled.trajectories, limit=limit))
        await self._write_generations(self._run.validation_data_dir, step, sampled)

    def hold(
        self,
        step: int,
        sampled: Sampled,
        *,
        phase: Phase,
        limit: int,
        batch: StepBatch | None = None,
    ) -> None:
        """Gives the trajectories to their store, and notes that it leaves some out."""
        note = self.trajectory_store.hold(
            step, sampled.trajectories, phase=phase, limit=limit, spans=sampled.spans, batch=batch
        )
        if note is not None:
            self.note(step, note)

    async def _write_generations(self, directory: Path | None, step: int, sampled: Sampled) -> None:
        if directory is not None:
            await asyncio.to_thread(
                write_generations, directory, step, sampled.trajectories, decode=self._decode
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run directory that is in use.

    Attributes:
        has_steps: Whether the run has not reached its last step.
    """

    record: RunRecord
    checkpoints: Checkpoints
    resume: ResumePoint
    has_steps: bool


def _begin(
    directory: RunDirectory, checkpoints: Checkpoints, config: AnyConfig, total_steps: int
) -> ResumePoint:
    resume = find_resume_point(directory, checkpoints, config)
    check_steps_left(resume, total_steps)
    if resume.set_back:
        checkpoints.set_back(resume.first_step - 1)
    best = config.schedule.best if isinstance(config, Config) else None
    checkpoints.choose_best(best, until=resume.first_step - 1)
    directory.write_config(config.model_dump(mode="json"))
    return resume


def _subscribe(
    record: RunRecord,
    config: AnyConfig,
    run_dir: Path,
    resume: ResumePoint,
    metrics_log: MetricsLog,
    report: LiveReport,
) -> None:
    record.on_step += [
        metrics_log.append,
        record.loggers.metrics,
        record.show_step,
        lambda step, values: report.step_done(step, values, busy=record.busy),
    ]
    if isinstance(config, Config):
        alert_log = AlertLog(run_dir / "alerts.jsonl", resume_after=resume.after)
        record.on_alert += [alert_log.append, record.loggers.alert]
        record.raise_alerts(Watch(read_metrics(run_dir / "metrics.jsonl")))


@asynccontextmanager
async def open_run(
    config: AnyConfig,
    run_dir: Path,
    *,
    total_steps: int,
    plan: str,
    notes: Sequence[str] = (),
    losses: Sequence[str] = (),
) -> AsyncIterator[OpenRun]:
    """Begins or resumes a run in its directory, and records it while the block runs.

    Raises:
        RunDirectoryError: The directory is in use, holds another run, or cannot be written.
        SetupError: The metrics cannot be served.
    """
    pace = Pace.of(config.schedule, total_steps=total_steps)
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(RunDirectory(run_dir))
        checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep=config.schedule.keep_checkpoints)
        resume = await asyncio.to_thread(_begin, directory, checkpoints, config, total_steps)
        display = stack.enter_context(
            open_progress(total_steps=total_steps, first_step=resume.first_step, pace=pace)
        )
        stack.enter_context(run_log(run_dir / "logs" / "trainer.log", display))
        metrics_log = stack.enter_context(open_metrics(run_dir, resume))
        metrics, metrics_url = stack.enter_context(serve_run_metrics(config.run))
        record = RunRecord(display, metrics, total_steps=total_steps, resumes=len(losses))
        record.on_note.append(NotesLog(run_dir / "notes.jsonl", resume_after=resume.after).append)
        record.show(f"run directory  {run_dir}\n{plan}")
        if metrics_url is not None:
            record.show(f"metrics for Prometheus  {metrics_url}")
        for note in (*notes, *resume.notes):
            record.show(note)
        has_steps = resume.first_step <= total_steps
        if has_steps and isinstance(config, Config):
            await stack.enter_async_context(run_tracing(config, run_dir, record.show))
        # Without a step left, too: the last trainer may have died before it recorded the end.
        report = await stack.enter_async_context(live_report(run_dir, pace=pace))
        if has_steps:
            record.loggers = await stack.enter_async_context(
                open_loggers(
                    config,
                    run_dir,
                    resumed_after=resume.after,
                    summary=lambda: final_numbers(read_metrics(run_dir / "metrics.jsonl")),
                )
            )
            for note in loss_notes(losses, after=resume.after):
                record.note(resume.first_step - 1, note)
        else:
            record.show(f"nothing to train: step {total_steps} has been reached")
        _subscribe(record, config, run_dir, resume, metrics_log, report)
        yield OpenRun(record=record, checkpoints=checkpoints, resume=resume, has_steps=has_steps)
