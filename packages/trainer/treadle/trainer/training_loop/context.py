"""The pieces of a run that is under way, and the moves that every schedule is made of.

Invariant: `version` is the weight version that the replicas in the rotation sample from, and
equals the number of steps trained. A move that fails leaves the run to end; nothing is retried
here, because what can be retried is retried where it failed.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from treadle.agent_loop import AgentTask, SamplingParams, Trajectory
from treadle.trainer.checkpoint.run_directory import Checkpoints
from treadle.trainer.config.schema import RunConfig
from treadle.trainer.data import DataOrder, Prompt
from treadle.trainer.policy.commands import Save, Update, UpdateStats
from treadle.trainer.policy.group import PolicyGroup
from treadle.trainer.policy.types import TrainSequence
from treadle.trainer.report import MetricsLog, Progress, TrajectoryLog
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.server_pool import ReplicaSet
from treadle.trainer.training_loop.memory_offload import HandOver
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError
from treadle.trainer.weight_sync.publisher import WeightPublisher

__all__ = ["Run", "Timer"]


@dataclass(slots=True)
class Timer:
    """Seconds per phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _started: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what happens inside as `time/<name>_s`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}_s"
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """All phases so far, and `time/step_s` since the timer was made."""
        return {**self.seconds, "time/step_s": time.perf_counter() - self._started}


@dataclass(slots=True, kw_only=True)
class Run:
    """A run under way."""

    config: RunConfig
    train: Sequence[Prompt]
    val: Sequence[Prompt]
    order: DataOrder
    total_steps: int
    version: int
    policy: PolicyGroup
    replicas: ReplicaSet
    rollout: Rollout
    publisher: WeightPublisher
    hand_over: HandOver | None
    """None: the servers keep their memory while the policy trains."""
    checkpoints: Checkpoints
    metrics_log: MetricsLog
    trajectory_log: TrajectoryLog
    progress: Progress
    noted: set[str] = field(default_factory=set)
    """Kinds of findings of which an example has been shown."""

    async def sample(
        self, split: Literal["train", "val"], step: int, tasks: Sequence[AgentTask]
    ) -> list[Trajectory]:
        """One trajectory per task, from the present weights; some go to the log, under `step`."""
        settings = self.config.rollout if split == "train" else self.config.rollout.val
        sampling = SamplingParams(  # seeds come with the tasks
            max_tokens=self.config.rollout.response_length,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        )
        phase = "rollout" if split == "train" else "validate"
        with (
            self.progress.phase(phase, total=len(tasks)),
            self.trajectory_log.recording() as recorded,
        ):
            trajectories = await self.rollout.run(
                tasks,
                sampling,
                min_weight_version=self.version,
                on_end=self.progress.advance,
            )
        self._note_findings(step, trajectories)
        run = self.config.run
        self.trajectory_log.append(
            step,
            trajectories,
            phase=split,
            limit=run.trajectories_per_step if split == "train" else run.val_trajectories,
            spans=recorded.spans,
        )
        return trajectories

    def _note_findings(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Shows the run's first example of each kind; the metrics `findings/*` count them."""
        for trajectory in trajectories:
            for finding in trajectory.findings:
                if finding.kind not in self.noted:
                    self.noted.add(finding.kind)
                    task = trajectory.task
                    self.progress.note(
                        f"step {step}: first {finding.kind} of the run, in {task.task_id}, rollout "
                        f"{task.rollout_index}: {finding.text}"
                    )

    async def release_memory(self) -> None:
        """Lends the servers' device memory to the policy, until `publish`, if that was asked."""
        if self.hand_over is not None:
            with self.progress.phase("release"):
                await self.hand_over.give()

    async def train_on(self, sequences: Sequence[TrainSequence]) -> UpdateStats:
        """The optimizer steps that one batch gives."""
        with self.progress.phase("train"):
            command = Update(
                sequences=tuple(sequences),
                algorithm=self.config.algorithm,
                temperature=self.config.rollout.temperature,
                free_memory=self.hand_over is not None,
            )
            stats = (await self.policy.call(command))[0]
        assert isinstance(stats, UpdateStats)
        return stats

    async def publish(self, version: int) -> dict[str, float]:
        """Gives the policy's weights to all replicas, as `version`; metrics of the bytes.

        Replicas that have all died are started again first, also if they die on the way.

        Raises:
            ReplicasLostError: none is left, and none may be started.
            WeightSyncError: none took the weights, and some of them live.
        """
        with self.progress.phase("sync"):
            report = None
            while report is None:
                await self.replicas.look()
                if revived := await self.replicas.revive():  # given `version` with the others
                    self.progress.note(f"started again: {', '.join(revived)}")
                if self.hand_over is not None:
                    await self.hand_over.take_weights()
                try:
                    report = await self.publisher.publish(version, self.replicas.clients)
                except WeightSyncError as error:
                    await self.replicas.look(after_failure=True)
                    if error.outcome is Outcome.FATAL or self.replicas.live:
                        raise
            if report.failed:
                await self.replicas.look(after_failure=True)
            for replica in self.replicas.live:
                if replica.name in report.failed:
                    await self.replicas.drop(replica.name, report.failed[replica.name])
            if self.hand_over is not None:
                await self.hand_over.take_rest()
        self.version = version
        return {
            "weights/bytes": float(report.num_bytes),
            "sync/bytes": float(report.sent_bytes),
            "sync/delta_ratio": report.sent_bytes / max(1, report.num_bytes),
        }

    async def republish(self, names: Sequence[str]) -> None:
        """Gives the present weights to the replicas of these names, started again just now.

        Raises:
            WeightSyncError: none of them took the weights, and no other replica is left.
        """
        self.progress.note(f"started again: {', '.join(names)}")
        if not self.version:  # version 0 is what servers load from the model directory
            return
        clients = [replica.client for replica in self.replicas.live if replica.name in names]
        try:
            failed = (await self.publisher.publish(self.version, clients)).failed
        except WeightSyncError as error:
            if error.outcome is Outcome.FATAL or len(clients) == len(self.replicas.live):
                raise
            failed = {client.name: str(error) for client in clients}
        for name, cause in failed.items():
            await self.replicas.drop(name, cause)

    async def save(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the checkpoint of `step`."""

        async def save_policy(directory: Path) -> None:
            await self.policy.call(Save(directory=directory))

        with self.progress.phase("save"):
            await self.checkpoints.save(step, metrics, save_policy)
