"""The set-up: from a plan and a run directory to a run that is ready for its first step.

Invariant: what is started is ended when the context is left, in reverse order, however it is left.
Processes start while the inputs are read; the first failure of either cancels the rest.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.rpc import Requirements
from treadle.trainer.checkpoint.run_directory import Checkpoint, Checkpoints
from treadle.trainer.config.schema import FileTransportConfig, RunConfig
from treadle.trainer.data import DataOrder, PromptRules
from treadle.trainer.data.load_data import Inputs, Rows, prepare
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.launch.process import Launcher
from treadle.trainer.plan import Plan
from treadle.trainer.policy.commands import Load
from treadle.trainer.policy.group import PolicyGroup
from treadle.trainer.report import MetricsLog, Progress, TrajectoryLog
from treadle.trainer.rollout.rollout import Republish, Rollout, needed_capabilities
from treadle.trainer.rollout.server_pool import ReplicaSet
from treadle.trainer.rollout.server_security import ServerSecurity
from treadle.trainer.training_loop.context import Run
from treadle.trainer.training_loop.memory_offload import HandOver
from treadle.trainer.weight_sync.publisher import WeightPublisher

__all__ = ["Setup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that a run is started from.

    Attributes:
        begun: Whether the run directory holds steps of this run already.
        checkpoint: What to go on from; None: from the model directory.
    """

    config: RunConfig
    rows: Rows
    rules: PromptRules
    plan: Plan
    run_dir: Path
    begun: bool
    checkpoints: Checkpoints
    checkpoint: Checkpoint | None
    progress: Progress

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncIterator[Run]:
        """Starts the processes, reads the inputs, and restores the checkpoint."""
        config = self.config
        async with contextlib.AsyncExitStack() as stack:
            metrics_log = stack.enter_context(self._metrics_log())
            launcher = await stack.enter_async_context(self._launcher())
            policy = self._policy(launcher)
            replicas = ReplicaSet(launcher, config, weights_directory=self._weights_directory)
            with self.progress.phase("start"):
                preparing = asyncio.to_thread(prepare, config, self.rows, self.rules)
                starting = [stack.enter_async_context(part) for part in (policy, replicas)]
                inputs, *_ = await concurrently([preparing, *starting])
            assert isinstance(inputs, Inputs)
            for note in inputs.notes:
                self.progress.note(note)
            if self.checkpoint is not None:
                await policy.call(Load(directory=self.checkpoint.policy_directory))
            trajectory_log = stack.enter_context(self._trajectory_log(inputs))
            run = self._run(inputs, policy, replicas, metrics_log, trajectory_log)
            await run.rollout.check_servers()
            if run.version:
                await run.publish(run.version)
            yield run

    @property
    def _resume_after(self) -> int | None:
        """As the logs take it: -1 keeps nothing of a run that never reached a checkpoint."""
        if self.checkpoint is not None:
            return self.checkpoint.step
        return -1 if self.begun else None

    def _metrics_log(self) -> MetricsLog:
        """Cut back to the checkpoint, whose own line is restored if it was not written."""
        log = MetricsLog(self.run_dir / "metrics.jsonl", resume_after=self._resume_after)
        if self.checkpoint is not None and log.last_step < self.checkpoint.step:
            log.append(self.checkpoint.step, self.checkpoint.metrics)
        return log

    def _trajectory_log(self, inputs: Inputs) -> TrajectoryLog:
        return TrajectoryLog(
            self.run_dir / "trajectories.jsonl",
            decode=inputs.renderer.decode,
            resume_after=self._resume_after,
        )

    def _launcher(self) -> Launcher:
        launch, logs = self.config.launch, self.run_dir / "logs"
        if launch.kind == "local":
            return LocalLauncher(logs)
        from treadle.trainer.launch.ray import RayLauncher

        return RayLauncher(launch, logs)

    def _policy(self, launcher: Launcher) -> PolicyGroup:
        config = self.config
        return PolicyGroup(
            launcher,
            config.policy,
            config.model.path,
            with_reference=config.algorithm.needs_reference,
            threads=self.plan.policy_threads,
            gpus_per_rank=getattr(config.launch, "gpus_per_policy_rank", 0.0),
            start_deadline_s=config.launch.start_deadline_s,
        )

    @property
    def _weights_directory(self) -> Path:
        transport = self.config.sync.transport
        given = transport.directory if isinstance(transport, FileTransportConfig) else None
        return (given or self.run_dir / "weights").resolve()

    def _run(
        self,
        inputs: Inputs,
        policy: PolicyGroup,
        replicas: ReplicaSet,
        metrics_log: MetricsLog,
        trajectory_log: TrajectoryLog,
    ) -> Run:
        config = self.config
        publisher = WeightPublisher(
            policy,
            config.sync,
            element_type=config.rollout.dtype,
            directory=self._weights_directory,
            security=ServerSecurity.of(config.rollout),
        )

        async def republish(names: Sequence[str]) -> None:
            await run.republish(names)

        run = Run(
            config=config,
            train=inputs.train,
            val=inputs.val,
            order=DataOrder(
                num_rows=len(inputs.train),
                batch_size=config.data.prompts_per_step,
                seed=config.run.seed,
                shuffle=config.data.shuffle,
            ),
            total_steps=self._total_steps(inputs),
            version=0 if self.checkpoint is None else self.checkpoint.step,
            policy=policy,
            replicas=replicas,
            rollout=self._rollout(inputs, replicas, republish),
            publisher=publisher,
            hand_over=self._hand_over(replicas),
            checkpoints=self.checkpoints,
            metrics_log=metrics_log,
            trajectory_log=trajectory_log,
            progress=self.progress,
        )
        return run

    def _hand_over(self, replicas: ReplicaSet) -> HandOver | None:
        rollout, sync = self.config.rollout, self.config.sync
        if not rollout.release_memory:
            return None
        return HandOver(
            replicas,
            multi_stage=rollout.multi_stage_wake_up,
            interrupt=sync.in_flight == "interrupt",
            max_attempts=sync.max_push_attempts,
        )

    def _total_steps(self, inputs: Inputs) -> int:
        """Of the plan, less what the rows that were left out would have made."""
        plan = replace(self.plan, num_train_rows=len(inputs.train))
        if plan.total_steps != self.plan.total_steps:
            self.progress.note(
                f"{plan.total_steps} steps, not {self.plan.total_steps}: {len(inputs.train)} "
                f"of {self.plan.num_train_rows} training rows are left"
            )
        return plan.total_steps

    def _rollout(self, inputs: Inputs, replicas: ReplicaSet, republish: Republish) -> Rollout:
        return Rollout(
            config=self.config,
            replicas=replicas,
            renderer=inputs.renderer,
            requirements=Requirements(
                tokenizer_sha256=inputs.renderer.tokenizer_sha256,
                vocab_size=inputs.renderer.vocab_size,
                context_length=self.config.rollout.context_length,
                capabilities=needed_capabilities(self.config),
            ),
            rules=inputs.rules,
            reward=inputs.reward,
            republish=republish,
        )
