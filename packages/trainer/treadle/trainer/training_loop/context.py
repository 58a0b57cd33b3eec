"""The training context: the parts of a run in progress, and the moves that schedules are made of.

Invariant: `version` is the weight version that the servers of the rotation sample from, and equals
the number of steps trained. A move that fails ends the run. Nothing is retried here: what can be
retried is retried where it failed.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from treadle.agent_loop import AgentTask
from treadle.policy.algorithms.estimators import FoundEstimator
from treadle.policy.algorithms.reward_kl import Charges
from treadle.policy.client.batch import MicroBatchRoom, of_loss_tokens
from treadle.policy.client.group import PolicyError, PolicyGroup
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.settings import to_json
from treadle.policy.v1 import checkpoint_service_pb2 as checkpoint_pb
from treadle.policy.v1 import rank_service_pb2 as rank_pb
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.tracing import SpanHandle, span
from treadle.trainer.checkpoint.run_directory import CRITIC, HF, POLICY, Checkpoints
from treadle.trainer.config.schema import Config
from treadle.trainer.data import DataOrder, MixedOrder, Prompt
from treadle.trainer.rollout.loops_from_config import sampling_params
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.served_reference import ServedReference
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.rollout.shaping import shaped
from treadle.trainer.time_shares.ranks import rank_shares, ranks_busy
from treadle.trainer.time_shares.servers import ServerShares
from treadle.trainer.tracing.run_tracing import span_attributes
from treadle.trainer.training_loop.groups import Group, StepBatch, Survivors
from treadle.trainer.training_loop.memory_offload import MemoryOffload
from treadle.trainer.training_loop.run_record import RunRecord, Sampled
from treadle.trainer.training_loop.schedules.group_queue import QueueState
from treadle.trainer.training_loop.schedules.group_store import GroupStore
from treadle.trainer.training_loop.update_metrics import (
    broken_policy,
    critic_metrics,
    update_metrics,
)

__all__ = ["Timer", "TrainingContext", "group_tasks"]


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
        val: Validation rows; may be empty.
        order: Which training rows each step uses.
        server_shares: Measures what their time goes to.
        reference: Rollout servers that hold the reference; None: the policy ranks do, or there is
            none.
        memory_offload: Lends the servers' memory to the policy; None: they keep it.
        group_store: Groups that have ended and are not trained on yet.
        resumed_groups: Where the groups of schedules beside training continue.
        batches: Number of the last batch of rows that was sampled; with dynamic sampling it runs
            ahead of the steps.
        room: Finds sequences that are longer than a micro-batch.
        surplus: Groups that the next step trains on first.
        unsaved: The last step and its metrics, if the policy has its weights and no checkpoint has
            them; None while a step trains.
    """

    config: Config
    train: Sequence[Prompt]
    val: Sequence[Prompt]
    order: DataOrder | MixedOrder
    estimator: FoundEstimator
    total_steps: int
    policy: PolicyGroup
    servers: ServerPool
    server_shares: ServerShares
    rollout: Rollout
    reference: ServedReference | None
    memory_offload: MemoryOffload | None
    checkpoints: Checkpoints
    record: RunRecord
    group_store: GroupStore
    resumed_groups: QueueState
    room: MicroBatchRoom
    batches: int = 0
    surplus: Sequence[Group] = ()
    kl_coef: float = 0.0
    unsaved: tuple[int, dict[str, float]] | None = None

    @property
    def version(self) -> int:
        """The weight version that the servers sample from."""
        return self.servers.weight_version

    def train_tasks(self, batch: int) -> list[AgentTask]:
        """Returns the tasks of a batch of rows: `samples_per_prompt` per row, adjacent.

        Without dynamic sampling a batch has the number of its step.
        """
        first = (batch - 1) * self.order.batch_size
        numbers = range(first, first + self.order.batch_size)
        return [task for number in numbers for task in self.group_tasks(number)]

    def group_tasks(self, number: int) -> Sequence[AgentTask]:
        """Returns the tasks of one group; groups are numbered from 0 in the order of the data."""
        return group_tasks(self.config, self.order, self.train, number)

    async def sample(
        self,
        phase: Literal["rollout", "greedy", "validate"],
        tasks: Sequence[AgentTask],
        *,
        step: int,
    ) -> Sampled:
        """Returns one scored trajectory per task, from the present weights.

        Args:
            phase: Decides how completions are sampled, and is named in the progress line.
            tasks: Members of a row are adjacent.

        Raises:
            NoServerLeftError: No server is left.
            OutageError: Something is down that the trajectories of a rollout need.
            SetupError: A restarted server does not fit.
        """
        with (
            self.record.phase(phase, total=len(tasks)),
            self.record.trajectory_log.recording() as recorded,
            span_attributes(self.config, tasks, step=step, validate=phase == "validate"),
        ):
            trajectories = await self.rollout.run(
                tasks,
                sampling_params(self.config, phase),
                min_weight_version=self.version,
                on_end=lambda _: self.record.advance(),
                routed_experts=phase == "rollout" and self.config.policy.moe.routing_replay,
            )
        self.record.firsts(step, trajectories)
        if phase != "validate":
            trajectories = [shaped(trajectory, self.config) for trajectory in trajectories]
        sampled = Sampled(trajectories=trajectories, spans=recorded.spans)
        if phase == "rollout" and len(trajectories) < len(tasks):
            await self.log_training(step, sampled, None)
        return sampled

    async def log_training(self, step: int, sampled: Sampled, batch: StepBatch | None) -> None:
        """Records the trajectories of a step; the batch is None if there is none.

        Raises:
            OutageError: Something is down that the trajectories need.
        """
        await self.record.sampled(step, sampled, batch)
        self.rollout.check_outages(sampled.trajectories)

    async def release_memory(self) -> None:
        """Lends the servers' device memory to the policy until `sync_weights`, if configured."""
        if self.memory_offload is not None:
            with self.record.phase("release"):
                await self.memory_offload.sleep()

    async def with_reference(self, survivors: Survivors) -> Survivors:
        """Returns them with the log-probabilities of the served reference.

        Raises:
            GenerationError: No server that holds it answers.
        """
        assert self.reference is not None
        with self.record.phase("reference"):
            return survivors.with_reference(await self.reference.logprobs(survivors.sequences))

    async def charge(self, survivors: Survivors) -> tuple[Survivors, Charges]:
        """Returns what the distance from the reference costs each token.

        The survivors that it returns carry what the update would compute again.

        Raises:
            PolicyError: A policy rank failed.
        """
        with self.record.phase("kl"):
            request = pb.MeasureReferenceRequest(
                algorithm=to_json(self.config.algorithm),
                temperature=self.config.rollout.temperature,
            )
            measured: pb.MeasureReferenceResponse
            measured = (await self.policy.call(request, survivors.sequences))[0]
        kl = of_loss_tokens(survivors.sequences, measured.kl)
        charges = Charges.of(survivors.sequences, kl, self.kl_coef)
        return survivors.with_logprobs(measured), charges

    async def with_values(self, survivors: Survivors) -> Survivors:
        """Returns the survivors with the critic's values.

        Raises:
            PolicyError: A policy rank failed.
        """
        with self.record.phase("values"):
            responses = await self.policy.call(pb.ValuesRequest(), survivors.sequences)
        return survivors.with_values(of_loss_tokens(survivors.sequences, responses[0].values))

    async def update_critic(
        self, step: int, sequences: Sequence[TrainSequence]
    ) -> pb.UpdateCriticResponse:
        """Runs the critic's optimizer steps of one batch.

        Raises:
            PolicyError: A policy rank failed, or the critic is not finite afterwards.
        """
        request = pb.UpdateCriticRequest(
            algorithm=to_json(self.config.algorithm),
            epochs=self.config.critic.epochs or self.config.algorithm.epochs,
            free_memory=self.memory_offload is not None,
        )
        with (
            self.record.phase("critic"),
            self._span("update", step, model="critic", sequences=len(sequences)) as trace,
        ):
            stats: pb.UpdateCriticResponse = (await self.policy.call(request, sequences))[0]
            if stats.broken:
                lower, good = "critic.optimizer.lr", self.checkpoints.last_good
                raise PolicyError(broken_policy(step, stats, good, lower=lower))
            if trace.recording:
                trace.set(output=critic_metrics(stats))
        return stats

    async def update_policy(
        self, step: int, sequences: Sequence[TrainSequence]
    ) -> pb.UpdateResponse:
        """Runs the optimizer steps of one batch.

        Raises:
            PolicyError: A policy rank failed, or the policy is not finite afterwards.
        """
        request = pb.UpdateRequest(
            algorithm=to_json(self.config.algorithm),
            temperature=self.config.rollout.temperature,
            free_memory=self.memory_offload is not None,
        )
        with (
            self.record.phase("train"),
            self._span("update", step, model="policy", sequences=len(sequences)) as trace,
        ):
            stats: pb.UpdateResponse = (await self.policy.call(request, sequences))[0]
            if stats.broken:
                raise PolicyError(broken_policy(step, stats, self.checkpoints.last_good))
            if trace.recording:
                trace.set(output=update_metrics(stats))
        return stats

    async def sync_weights(self, version: int) -> dict[str, float]:
        """Gives the policy's weights to all servers, as `version`; returns metrics of the bytes.

        Raises:
            NoServerLeftError: No server is left, and none may be started.
            WeightSyncError: No server took the weights, and some of them live.
            SetupError: A restarted server does not fit.
        """
        offload = self.memory_offload
        with (
            self.record.phase("sync"),
            self._span("weight_sync", version, servers=len(self.servers.live)) as trace,
        ):
            report = await self.servers.sync_weights(
                version, prepare=None if offload is None else offload.wake_weights
            )
            if offload is not None:
                await offload.wake_kv_cache()
            metrics = {
                "weights/bytes": float(report.num_bytes),
                "sync/bytes": float(report.sent_bytes),
                "sync/delta_ratio": report.sent_bytes / max(1, report.num_bytes),
            }
            trace.set(output=metrics)
        return metrics

    def _span(self, name: str, step: int, **attributes: object) -> SpanHandle:
        name_of_run = self.config.run.name
        return span(name, step=step, validate=False, experiment_name=name_of_run, **attributes)

    async def offload_metrics(self) -> dict[str, float]:
        """Returns what `policy.offload` moved since the last call, of the rank with the most.

        Raises:
            PolicyError: A policy rank failed.
        """
        if not self.config.policy.offload.names:
            return {}
        reports: Sequence[rank_pb.ReportOffloadResponse]
        reports = await self.policy.call(rank_pb.ReportOffloadRequest())
        return {
            "offload/release_s": max(report.release_s for report in reports),
            "offload/restore_s": max(report.restore_s for report in reports),
            "offload/freed_bytes": float(max(report.freed_bytes for report in reports)),
            "offload/host_bytes": float(max(report.host_bytes for report in reports)),
        }

    async def time_shares(self, phases: Mapping[str, float]) -> dict[str, float]:
        """Returns what the time since the last call went to, of the servers and of the ranks.

        Args:
            phases: Seconds of the driver's phases since then.

        Raises:
            PolicyError: A policy rank failed.
        """
        responses = await self.policy.call(rank_pb.ReportTimeRequest())
        reports = [response.seconds for response in responses]
        shares = {**await self.server_shares.take(phases), **rank_shares(reports, phases)}
        self.record.busy = {**self.server_shares.busy, **ranks_busy(reports)}
        return shares

    async def save_model(self, step: int, *, with_hf: bool) -> None:
        """Writes the model of the checkpoint, also as a Hugging Face directory if wanted."""

        async def write(directory: Path) -> None:
            call = self.policy.call
            await call(checkpoint_pb.SaveRequest(directory=str(directory / POLICY)))
            if self.config.algorithm.needs_critic:
                await call(checkpoint_pb.SaveCriticRequest(directory=str(directory / CRITIC)))
            if with_hf:
                await call(checkpoint_pb.SaveHfRequest(directory=str(directory / HF)))

        with self.record.phase("save"):
            await self.checkpoints.write_model(step, write)

    async def complete_checkpoint(
        self,
        step: int,
        metrics: dict[str, float],
        groups: Mapping[str, object] | None = None,
    ) -> None:
        """Makes the model that was saved a checkpoint, with the metrics of its step.

        Args:
            groups: State that a resume needs of groups that are sampled beside training.
        """
        with self.record.phase("save"):
            await self.record.trajectory_store.flush()
            await self.checkpoints.complete(step, metrics, groups)
        self.unsaved = None


def group_tasks(
    config: Config, order: DataOrder | MixedOrder, train: Sequence[Prompt], number: int
) -> Sequence[AgentTask]:
    """Returns the tasks of a group: `samples_per_prompt` of its row.

    Args:
        order: Which rows each batch has.
        number: Number of the group, from 0 in the order of the data.
    """
    batch, place = number // order.batch_size + 1, number % order.batch_size
    row = train[order.batch(batch)[place]]
    samples, seed = config.rollout.samples_per_prompt, config.run.seed
    return row.tasks(samples=samples, seed=seed, step=batch)
