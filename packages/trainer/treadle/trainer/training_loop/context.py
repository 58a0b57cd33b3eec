"""The training context: the parts of a run in progress, and the moves that schedules are made of.

Invariant: `version` is the weight version that the servers of the rotation sample from, and equals
the number of steps trained. A move that fails ends the run. Nothing is retried here: what can be
retried is retried where it failed.
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from treadle.agent_loop import AgentTask, Trajectory
from treadle.trainer.checkpoint.run_directory import HF, POLICY, Checkpoints
from treadle.trainer.config.schema import Config
from treadle.trainer.data import DataOrder, Prompt
from treadle.trainer.own_code import OnStep
from treadle.trainer.policy.commands import Save, SaveHf, Update, UpdateStats
from treadle.trainer.policy.group import PolicyError, PolicyGroup
from treadle.trainer.policy.types import TrainSequence
from treadle.trainer.report import LiveReport, MetricsLog, NotesLog, Progress, TrajectoryLog
from treadle.trainer.report.warning_signs import Watch
from treadle.trainer.rollout.loops_from_config import sampling_params
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.training_loop.first_of_kind import FirstOfKind
from treadle.trainer.training_loop.groups import trajectory_advantages
from treadle.trainer.training_loop.memory_offload import MemoryOffload

__all__ = ["Timer", "TrainingContext"]


@dataclass(slots=True)
class Timer:
    """Seconds per phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _started: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `time/<name>_s`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}_s"
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Returns all phases so far, and `time/step_s` since the timer was made."""
        return {**self.seconds, "time/step_s": time.perf_counter() - self._started}


@dataclass(slots=True, kw_only=True)
class TrainingContext:
    """A run in progress.

    Attributes:
        config: The resolved configuration.
        train: Training rows.
        val: Validation rows; may be empty.
        order: Which training rows each step uses.
        total_steps: The last step's number.
        policy: The policy ranks.
        servers: The rollout servers.
        rollout: Samples trajectories on `servers`.
        memory_offload: Lends the servers' memory to the policy; None: they keep it.
        checkpoints: Where checkpoints are kept.
        metrics_log: Of the run directory.
        trajectory_log: Of the run directory.
        notes_log: Of the run directory.
        progress: What the user sees.
        report: Of the run directory; rewritten after each validation and each checkpoint.
        on_step: Called after each step; None: nothing is.
        first_of_kind: Knows the kinds of failures and findings that were shown.
        watch: Finds warning signs in the metrics.
    """

    config: Config
    train: Sequence[Prompt]
    val: Sequence[Prompt]
    order: DataOrder
    total_steps: int
    policy: PolicyGroup
    servers: ServerPool
    rollout: Rollout
    memory_offload: MemoryOffload | None
    checkpoints: Checkpoints
    metrics_log: MetricsLog
    trajectory_log: TrajectoryLog
    notes_log: NotesLog
    progress: Progress
    report: LiveReport
    on_step: OnStep | None = None
    first_of_kind: FirstOfKind = field(default_factory=FirstOfKind)
    watch: Watch = field(default_factory=Watch)

    @property
    def version(self) -> int:
        """The weight version that the servers sample from."""
        return self.servers.weight_version

    def train_tasks(self, step: int) -> list[AgentTask]:
        """Returns the tasks of a step: `samples_per_prompt` per row, adjacent."""
        samples, seed = self.config.rollout.samples_per_prompt, self.config.run.seed
        return [
            task
            for index in self.order.batch(step)
            for task in self.train[index].tasks(samples=samples, seed=seed, step=step)
        ]

    async def sample(
        self, split: Literal["train", "val"], step: int, tasks: Sequence[AgentTask]
    ) -> list[Trajectory]:
        """Returns one scored trajectory per task, from the present weights; logs some of them."""
        phase = "rollout" if split == "train" else "validate"
        with (
            self.progress.phase(phase, total=len(tasks)),
            self.trajectory_log.recording() as recorded,
        ):
            trajectories = await self.rollout.run(
                tasks,
                sampling_params(self.config, split),
                min_weight_version=self.version,
                on_end=lambda _: self.progress.advance(),
            )
        for text in self.first_of_kind.take(trajectories):
            self.note(step, text)
        run = self.config.run
        self.trajectory_log.append(
            step,
            trajectories,
            phase=split,
            limit=run.trajectories_per_step if split == "train" else run.val_trajectories,
            advantages=trajectory_advantages(
                trajectories, norm_by_std=self.config.algorithm.norm_by_std
            )
            if split == "train"
            else None,
            spans=recorded.spans,
        )
        return trajectories

    def note(self, step: int, text: str) -> None:
        """Says something about a step: on the console, in the log and in the report."""
        self.progress.note(f"step {step}: {text}")
        self.notes_log.append(step, text)

    async def release_memory(self) -> None:
        """Lends the servers' device memory to the policy until `sync_weights`, if configured."""
        if self.memory_offload is not None:
            with self.progress.phase("release"):
                await self.memory_offload.sleep()

    async def update_policy(self, step: int, sequences: Sequence[TrainSequence]) -> UpdateStats:
        """Runs the optimizer steps of one batch.

        Raises:
            PolicyError: A policy rank failed, or the policy is not finite afterwards.
        """
        with self.progress.phase("train"):
            command = Update(
                sequences=tuple(sequences),
                algorithm=self.config.algorithm,
                temperature=self.config.rollout.temperature,
                free_memory=self.memory_offload is not None,
            )
            stats = (await self.policy.call(command))[0]
        assert isinstance(stats, UpdateStats)
        if stats.broken is not None:
            raise PolicyError(self._broken_policy(step, stats))
        return stats

    def _broken_policy(self, step: int, stats: UpdateStats) -> str:
        """Says which update broke the policy; later ones have no finite gradient."""
        applied = [update for update in stats.steps if not update.skipped]
        last = applied[-1] if applied else stats.steps[-1]
        kept = self.checkpoints.last_good
        go_on = (
            "no checkpoint was saved before: start again in another run.dir"
            if kept is None
            else f"the last good checkpoint is {kept}: start again with the same run.dir"
        )
        return (
            f"step {step}: the update left {stats.broken} (gradient norm "
            f"{last.grad_norm:.4g}, learning rate {last.learning_rate:.4g}); they are neither "
            f"published nor saved. {go_on[0].upper()}{go_on[1:]} and a lower policy.optimizer.lr"
        )

    async def sync_weights(self, version: int) -> dict[str, float]:
        """Gives the policy's weights to all servers, as `version`; returns metrics of the bytes.

        Raises:
            NoServerLeftError: no server is left, and none may be started.
            WeightSyncError: no server took the weights, and some of them live.
            SetupError: a restarted server does not fit.
        """
        offload = self.memory_offload
        with self.progress.phase("sync"):
            report = await self.servers.sync_weights(
                version, prepare=None if offload is None else offload.wake_weights
            )
            if offload is not None:
                await offload.wake_kv_cache()
        return {
            "weights/bytes": float(report.num_bytes),
            "sync/bytes": float(report.sent_bytes),
            "sync/delta_ratio": report.sent_bytes / max(1, report.num_bytes),
        }

    async def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the step, shows it, and calls the user's hook, in a thread if it is not async."""
        self.metrics_log.append(step, metrics)
        self.progress.step_done(step, metrics)
        if step > 0:
            for sign in self.watch.step(metrics):
                self.note(step, sign)
        if not metrics.keys().isdisjoint(("time/validate_s", "time/save_s")):
            self.report.update()
        if self.on_step is None:
            return
        if inspect.iscoroutinefunction(self.on_step):
            await self.on_step(step, metrics)
        else:
            await asyncio.to_thread(self.on_step, step, metrics)

    async def save(self, step: int, metrics: dict[str, float], *, with_hf: bool) -> None:
        """Writes the checkpoint of `step`, with the model as a Hugging Face directory if wanted."""

        async def write(directory: Path) -> None:
            await self.policy.call(Save(directory=directory / POLICY))
            if with_hf:
                await self.policy.call(SaveHf(directory=directory / HF))

        with self.progress.phase("save"):
            await self.checkpoints.save(step, metrics, write)
