"""`treadle sft`: from a checked configuration to a finished run directory.

Each step: an optimizer step on `data.batch_size` conversations, validation, checkpoint.

Invariant: when `run_sft` returns or raises, every process that it started has ended, and the run
directory holds a state from which the same call resumes. The conversations of step s are a function
of seed and step, so a resumed run repeats what came after its checkpoint bit for bit.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path

from treadle.policy.client.group import PolicyError, PolicyGroup
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.checkpoint_service_pb2 import LoadRequest, SaveHfRequest, SaveRequest
from treadle.trainer.checkpoint.begin_or_resume import (
    check_steps_left,
    find_resume_point,
    open_metrics,
)
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    HF,
    POLICY,
    Checkpoints,
    RunDirectory,
)
from treadle.trainer.config.topology import make_topology
from treadle.trainer.data import DataOrder
from treadle.trainer.launch.make_launcher import make_launcher
from treadle.trainer.launch.policy_ranks import rank_starter
from treadle.trainer.launch.resuming import loss_notes
from treadle.trainer.loggers.loggers import Loggers, open_loggers
from treadle.trainer.model_source import resolve_model
from treadle.trainer.report import (
    LiveReport,
    MetricsLog,
    NotesLog,
    Pace,
    Progress,
    Summary,
    final_numbers,
    live_report,
    open_progress,
    read_metrics,
    summarize,
)
from treadle.trainer.report.metrics import TRAIN_LOSS, VAL_LOSS
from treadle.trainer.report.prometheus import serve_run_metrics
from treadle.trainer.report.terminal.logged_progress import LoggedProgress
from treadle.trainer.report.terminal.measured_progress import MeasuredProgress
from treadle.trainer.sft.check import CheckedSft
from treadle.trainer.sft.examples import batch_of
from treadle.trainer.training_loop.context import Timer
from treadle.trainer.training_loop.interruption import finished_first
from treadle.trainer.training_loop.run_log import run_log
from treadle.trainer.training_loop.update_metrics import broken_policy

__all__ = ["run_sft"]


async def run_sft(run: CheckedSft, *, losses: Sequence[str] = ()) -> Summary:
    """Trains to the end of the configuration; returns a summary.

    A run that began in the run's directory is resumed.

    Args:
        losses: What earlier attempts of this process lost, in order (see `run_resuming`).

    Raises:
        SetupError: The model's weights cannot be fetched.
        RunDirectoryError: The directory is in use, holds another run, or cannot be written.
        PolicyError: A policy rank failed, or an update left a policy that is not finite.
        ProcessError: A policy rank did not start.
    """
    config, run_dir, total = run.config, run.run_dir, run.total_steps
    model = await asyncio.to_thread(resolve_model, config.model.path)
    with RunDirectory(run_dir) as directory:
        checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep=config.schedule.keep_checkpoints)
        resume = await asyncio.to_thread(find_resume_point, directory, checkpoints, config)
        check_steps_left(resume, total)
        if resume.set_back:
            checkpoints.set_back(resume.first_step - 1)
        directory.write_config(config.model_dump(mode="json"))
        first = resume.first_step
        with (
            open_progress(
                total_steps=total,
                first_step=first,
                pace=Pace.of(config.schedule, total_steps=total),
            ) as display,
            run_log(run_dir / "logs" / "trainer.log", display),
            open_metrics(run_dir, resume) as metrics_log,
            serve_run_metrics(config.run) as (run_metrics, metrics_url),
        ):
            progress = MeasuredProgress(LoggedProgress(display, total_steps=total), run_metrics)
            progress.note(f"run directory  {run_dir}\n{run.plan()}")
            if metrics_url is not None:
                progress.note(f"metrics for Prometheus  {metrics_url}")
            for note in (*run.notes, *resume.notes):
                progress.note(note)
            notes_log = NotesLog(run_dir / "notes.jsonl", resume_after=resume.after)
            for note in loss_notes(losses, after=resume.after):
                progress.note(f"step {first - 1}: {note}")
                notes_log.append(first - 1, note)
            async with live_report(
                run_dir, pace=Pace.of(config.schedule, total_steps=total)
            ) as report:
                if first > total:
                    progress.note(f"nothing to train: step {total} has been reached")
                else:
                    checkpoint = resume.checkpoint
                    async with open_loggers(
                        config,
                        run_dir,
                        resumed_after=resume.after,
                        summary=lambda: final_numbers(read_metrics(run_dir / "metrics.jsonl")),
                    ) as loggers:
                        await _train(
                            run,
                            model,
                            first_step=first,
                            load=None if checkpoint is None else checkpoint.policy_directory,
                            steps=_Steps(
                                run,
                                checkpoints,
                                metrics_log,
                                loggers,
                                progress,
                                report,
                                resumes=len(losses),
                            ),
                        )
        return summarize(await asyncio.to_thread(read_metrics, run_dir / "metrics.jsonl"))


async def _train(
    run: CheckedSft, model: Path, *, first_step: int, load: Path | None, steps: "_Steps"
) -> None:
    config = run.config
    topology = make_topology(config.launch, config.policy)
    gpus = getattr(config.launch, "gpus_per_policy_rank", 0.0)
    devices = () if topology is None else topology.ranks
    async with make_launcher(config, run.run_dir / "logs") as launcher:
        policy = PolicyGroup(
            rank_starter(launcher, threads=run.policy_threads, gpus=gpus, devices=devices),
            config.policy,
            model,
            with_reference=False,
            own_devices=bool(gpus or devices),
            start_deadline_s=config.launch.start_deadline_s,
            tls=None if launcher.tls is None else launcher.tls.directory,
        )
        async with policy:
            if load is not None:
                await policy.call(LoadRequest(directory=str(load)))
            if first_step == 1 and run.val is not None and config.schedule.val_before_train:
                timer = Timer()
                steps.done(0, {**await steps.validate(policy, timer), **timer.seconds})
            try:
                for step in range(first_step, run.total_steps + 1):
                    await finished_first(steps.take(policy, step), say=steps.say)
            except asyncio.CancelledError:
                await steps.save_interrupted(policy)
                raise


class _Steps:
    """The steps of a run, and where they are recorded."""

    def __init__(
        self,
        run: CheckedSft,
        checkpoints: Checkpoints,
        metrics_log: MetricsLog,
        loggers: Loggers,
        progress: Progress,
        report: LiveReport,
        *,
        resumes: int,
    ) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._metrics_log = metrics_log
        self._loggers = loggers
        self._progress = progress
        self._report = report
        self._resumes = float(resumes)
        self._unsaved: tuple[int, dict[str, float]] | None = None  # None while a step trains
        self._saved_at = time.monotonic()
        self.say = progress.note
        data = run.config.data
        self._order = DataOrder(
            num_rows=len(run.train.examples),
            batch_size=data.batch_size,
            seed=run.config.run.seed,
            shuffle=data.shuffle,
        )
        self._val = () if run.val is None else batch_of(run.val.examples)

    async def take(self, policy: PolicyGroup, step: int) -> None:
        """Takes a step.

        Raises:
            PolicyError: A rank failed, or the policy is not finite afterwards.
            RunDirectoryError: The checkpoint cannot be written.
        """
        config, schedule, timer = self._run.config, self._run.config.schedule, Timer()
        self._unsaved = None
        with timer.phase("train"), self._progress.phase("train"):
            batch = batch_of([self._run.train.examples[row] for row in self._order.batch(step)])
            request = pb.FineTuneRequest(aggregation=config.algorithm.loss_aggregation)
            stats: pb.FineTuneResponse = (await policy.call(request, batch))[0]
        if stats.broken:
            raise PolicyError(broken_policy(step, stats, self._checkpoints.last_good))
        metrics = _metrics(stats) | {
            "data/epoch": float(self._order.epoch(step)),
            "run/resumes": self._resumes,
        }

        last = step == self._run.total_steps
        if self._val and _due(schedule.val_every, step, or_now=last):
            metrics |= await self.validate(policy, timer)

        # The checkpoint carries the metrics, so that a resumed run can restore this step's line.
        due = (last and schedule.save_last) or _due(schedule.save_every, step)
        if due or schedule.is_time_to_save(self._saved_at):
            with_hf = schedule.save_hf == "every" or (last and schedule.save_hf == "last")
            with timer.phase("save"), self._progress.phase("save"):
                await self._save(policy, step, metrics | timer.metrics(), with_hf=with_hf)
        else:
            self._unsaved = step, metrics | timer.metrics()
        self.done(step, metrics | timer.metrics())

    async def save_interrupted(self, policy: PolicyGroup) -> None:
        """Saves the last step of a run that is interrupted between two steps."""
        if self._unsaved is not None and (schedule := self._run.config.schedule).keeps_checkpoints:
            step, metrics = self._unsaved
            self.say(f"interrupted: saving step {step}; interrupt again to end now")
            await self._save(policy, step, metrics, with_hf=schedule.save_hf == "every")

    async def validate(self, policy: PolicyGroup, timer: Timer) -> dict[str, float]:
        """Returns the loss on the held-out conversations, per token."""
        with timer.phase("validate"), self._progress.phase("validate"):
            sums = (await policy.call(pb.LogprobSumsRequest(), self._val))[0].sums
        tokens = sum(sequence.num_loss_tokens for sequence in self._val)
        return {VAL_LOSS: -math.fsum(sums) / tokens}

    def done(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the step and shows it."""
        self._metrics_log.append(step, metrics)
        self._loggers.metrics(step, metrics)
        self._progress.step_done(step, metrics)
        self._report.step_done(step, metrics)
        if not metrics.keys().isdisjoint(("time/validate_s", "time/save_s")):
            self._report.update()

    async def _save(
        self, policy: PolicyGroup, step: int, metrics: dict[str, float], *, with_hf: bool
    ) -> None:
        async def write(directory: Path) -> None:
            await policy.call(SaveRequest(directory=str(directory / POLICY)))
            if with_hf:
                await policy.call(SaveHfRequest(directory=str(directory / HF)))

        await self._checkpoints.save(step, metrics, write)
        self._saved_at = time.monotonic()


def _metrics(stats: pb.FineTuneResponse) -> dict[str, float]:
    (update,) = stats.steps
    return {
        TRAIN_LOSS: update.loss,
        "train/grad_norm": update.grad_norm,
        "train/lr": update.learning_rate,
        "train/skipped_updates": float(update.skipped),
        "train/micro_batches": float(update.num_micro_batches),
        "sequences/trained": float(update.num_sequences),
        "tokens/trained": float(update.num_tokens),
        "tokens/loss": float(update.num_loss_tokens),
    }


def _due(every: int | None, step: int, *, or_now: bool = False) -> bool:
    return every is not None and (or_now or step % every == 0)
