"""`treadle sft`: from a checked configuration to a finished run directory.

Each step: an optimizer step on `data.batch_size` conversations, validation, checkpoint.

Invariant: when `run_sft` returns or raises, every process that it started has ended, and the run
directory holds a state from which the same call resumes. The conversations of step s are a function
of seed and step, so a resumed run repeats what came after its checkpoint bit for bit.
"""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

from treadle.policy.client.batch import MicroBatchRoom
from treadle.policy.client.group import PolicyError, PolicyGroup
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.checkpoint_service_pb2 import LoadRequest, SaveHfRequest, SaveRequest
from treadle.trainer.checkpoint.run_directory import HF, POLICY, PROFILES
from treadle.trainer.data import DataOrder
from treadle.trainer.launch.make_launcher import make_launcher
from treadle.trainer.launch.policy_group import policy_group
from treadle.trainer.model_source import resolve_model, with_model
from treadle.trainer.report import Summary, read_metrics, summarize
from treadle.trainer.report.metrics import TRAIN_LOSS, VAL_LOSS
from treadle.trainer.sft.check import CheckedSft
from treadle.trainer.sft.examples import batch_of
from treadle.trainer.training_loop.context import Timer
from treadle.trainer.training_loop.interruption import finished_first
from treadle.trainer.training_loop.run_record import OpenRun, open_run
from treadle.trainer.training_loop.update_metrics import broken_policy

__all__ = ["run_sft"]


async def run_sft(run: CheckedSft, *, losses: Sequence[str] = ()) -> Summary:
    """Trains to the end of the configuration; returns a summary.

    A run that began in the run's directory is resumed.

    Raises:
        SetupError: The model's weights cannot be fetched.
        RunDirectoryError: The directory is in use, holds another run, or cannot be written.
        PolicyError: A policy rank failed, or an update left a policy that is not finite.
        ProcessError: A policy rank did not start.
    """
    model = await asyncio.to_thread(resolve_model, run.config.model.path)
    config = with_model(run.config, model)
    async with open_run(
        run.config,
        run.run_dir,
        total_steps=run.total_steps,
        plan=run.plan(),
        notes=run.notes,
        losses=losses,
    ) as opened:
        if opened.has_steps:
            async with (
                make_launcher(config, run.run_dir / "logs") as launcher,
                policy_group(
                    config, launcher, threads=run.policy_threads, profiles=run.run_dir / PROFILES
                ) as policy,
            ):
                await _Steps(run, opened, policy).take_all()
    return summarize(await asyncio.to_thread(read_metrics, run.run_dir / "metrics.jsonl"))


class _Steps:
    """The steps of a run."""

    def __init__(self, run: CheckedSft, opened: OpenRun, policy: PolicyGroup) -> None:
        self._policy = policy
        self._run = run
        self._resume = opened.resume
        self._checkpoints = opened.checkpoints
        self._record = opened.record
        self._unsaved: tuple[int, dict[str, float]] | None = None  # None while a step trains
        self._room = MicroBatchRoom(run.config.policy)
        data = run.config.data
        self._order = DataOrder(
            num_rows=len(run.train.examples),
            batch_size=data.batch_size,
            seed=run.config.run.seed,
            shuffle=data.shuffle,
        )
        self._val = () if run.val is None else batch_of(run.val.examples)

    async def take_all(self) -> None:
        """Takes the steps that are left.

        Raises:
            PolicyError: A rank failed, or the policy is not finite after a step.
            RunDirectoryError: A checkpoint cannot be written.
        """
        first, record = self._resume.first_step, self._record
        if (checkpoint := self._resume.checkpoint) is not None:
            await self._policy.call(LoadRequest(directory=str(checkpoint.policy_directory)))
        if first == 1 and self._val and self._run.config.schedule.val_before_train:
            timer = Timer()
            await record.step(0, {**await self._validate(timer), **timer.seconds})
        try:
            for step in range(first, self._run.total_steps + 1):
                await finished_first(self._take(step), say=record.show)
        except asyncio.CancelledError:
            await self._save_interrupted()
            raise

    async def _take(self, step: int) -> None:
        config, schedule, timer = self._run.config, self._run.config.schedule, Timer()
        self._unsaved = None
        with timer.phase("train"), self._record.phase("train"):
            batch = batch_of([self._run.train.examples[row] for row in self._order.batch(step)])
            if text := self._room.too_long(batch):
                self._record.note(step, text)
            request = pb.FineTuneRequest(aggregation=config.algorithm.loss_aggregation)
            stats: pb.FineTuneResponse = (await self._policy.call(request, batch))[0]
        if stats.broken:
            raise PolicyError(broken_policy(step, stats, self._checkpoints.last_good))
        metrics = _metrics(stats) | {
            "data/epoch": float(self._order.epoch(step)),
            "run/resumes": float(self._record.resumes),
        }

        last = step == self._run.total_steps
        if self._val and schedule.validates(step, last=last):
            metrics |= await self._validate(timer)

        # The checkpoint carries the metrics, so that a resumed run can restore this step's line.
        due = schedule.saves(step, last=last)
        if due or schedule.is_time_to_save(self._checkpoints.saved_at):
            with timer.phase("save"), self._record.phase("save"):
                with_hf = schedule.saves_hf(step, last=last)
                await self._save(step, metrics | timer.metrics(), with_hf=with_hf)
        else:
            self._unsaved = step, metrics | timer.metrics()
        await self._record.step(step, metrics | timer.metrics())

    async def _save_interrupted(self) -> None:
        """Saves the last step of a run that is interrupted between two steps."""
        if self._unsaved is not None and (schedule := self._run.config.schedule).keeps_checkpoints:
            step, metrics = self._unsaved
            self._record.show(f"interrupted: saving step {step}; interrupt again to end now")
            await self._save(step, metrics, with_hf=schedule.save_hf == "every")

    async def _validate(self, timer: Timer) -> dict[str, float]:
        """Returns the loss on the held-out conversations, per token."""
        with timer.phase("validate"), self._record.phase("validate"):
            sums = (await self._policy.call(pb.LogprobSumsRequest(), self._val))[0].sums
        tokens = sum(sequence.num_loss_tokens for sequence in self._val)
        return {VAL_LOSS: -math.fsum(sums) / tokens}

    async def _save(self, step: int, metrics: dict[str, float], *, with_hf: bool) -> None:
        async def write(directory: Path) -> None:
            await self._policy.call(SaveRequest(directory=str(directory / POLICY)))
            if with_hf:
                await self._policy.call(SaveHfRequest(directory=str(directory / HF)))

        await self._checkpoints.save(step, metrics, write)


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
        **{name: value for name, value in update.metrics.items() if name.startswith("policy/")},
    }
