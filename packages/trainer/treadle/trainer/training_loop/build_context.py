"""Builds the training context: from a plan and a run directory to a run ready for its first step.

Invariant: what was started is ended in reverse order when the context exits, for whatever reason.
Processes start together; the first failure cancels the rest.
"""

import contextlib
import gc
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.rpc import Requirements
from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.algorithms.reward_kl import coefficient_after
from treadle.policy.client.group import PolicyGroup
from treadle.policy.config.weight_sync import FileTransportConfig
from treadle.policy.v1.checkpoint_service_pb2 import LoadCriticRequest, LoadRequest
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.trainer.checkpoint.begin_or_resume import ResumePoint
from treadle.trainer.checkpoint.run_directory import Checkpoint, Checkpoints
from treadle.trainer.config.schema import Config
from treadle.trainer.config.topology import make_topology
from treadle.trainer.data import DataOrder
from treadle.trainer.data.load_data import Inputs, enter_reward
from treadle.trainer.launch.garbage import exempt_present_objects
from treadle.trainer.launch.make_launcher import make_launcher
from treadle.trainer.launch.policy_ranks import rank_starter
from treadle.trainer.launch.process import Launcher
from treadle.trainer.loggers.loggers import Loggers
from treadle.trainer.own_code import OwnCode
from treadle.trainer.plan import Plan
from treadle.trainer.report import (
    AlertLog,
    LiveReport,
    MetricsLog,
    NotesLog,
    Progress,
    TrajectoryLog,
    read_metrics,
)
from treadle.trainer.report.prometheus import RunMetrics
from treadle.trainer.report.warning_signs import Watch
from treadle.trainer.rollout.control.server_control import control_servers
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.served_reference import connect_reference
from treadle.trainer.rollout.server_pool import ServerPool, required_capabilities
from treadle.trainer.rollout.server_process import server_traces
from treadle.trainer.rollout.server_security import server_security, with_own_secrets
from treadle.trainer.rollout.workers.pool import LoopWorkers, loop_workers
from treadle.trainer.rollout.workers.router import RunRouter
from treadle.trainer.time_shares.servers import ServerShares
from treadle.trainer.training_loop.context import TrainingContext, group_tasks
from treadle.trainer.training_loop.memory_offload import MemoryOffload
from treadle.trainer.training_loop.schedules.group_queue import QueueState
from treadle.trainer.training_loop.schedules.group_store import GROUPS, GroupStore
from treadle.trainer.training_loop.trajectory_store import TrajectoryStore

__all__ = ["build_context", "policy_group", "total_steps"]


@contextlib.asynccontextmanager
async def build_context(
    config: Config,
    inputs: Inputs,
    *,
    own: OwnCode,
    plan: Plan,
    run_dir: Path,
    resume: ResumePoint,
    checkpoints: Checkpoints,
    metrics_log: MetricsLog,
    loggers: Loggers,
    progress: Progress,
    run_metrics: RunMetrics,
    report: LiveReport,
) -> AsyncIterator[TrainingContext]:
    """Starts the processes, and restores the checkpoint.

    Args:
        own: The user's objects beside the configuration.
        report: What the user sees later.

    Raises:
        ProcessError: A process did not start.
        PolicyError: The ranks cannot load the model or the checkpoint.
        SetupError: A server, a judge or a reference does not answer, or lacks what the run needs.
        NoServerLeftError: No server is left, and none may be started.
        WeightSyncError: No server took the checkpoint's weights.
        OSError: The run directory cannot be written.
    """
    checkpoint, resume_after = resume.checkpoint, resume.after
    # The last checkpoint's weights; 0: those of the model directory.
    version = 0 if checkpoint is None else checkpoint.step
    async with contextlib.AsyncExitStack() as stack:
        if not config.agent.num_workers:  # which open their own
            await enter_reward(stack, inputs.reward)
            await stack.enter_async_context(inputs.rules.loops.opened(inputs.loops))
        launcher = await stack.enter_async_context(make_launcher(config, run_dir / "logs"))
        weights_directory = _weights_directory(config, run_dir)
        secured = stack.enter_context(with_own_secrets(config, run_dir, launcher.tls))
        policy = policy_group(config, launcher, threads=plan.policy_threads)
        publisher = WeightPublisher(
            policy,
            config.sync,
            element_type=config.rollout.dtype,
            directory=weights_directory,
            security=server_security(secured.rollout),
        )
        servers = ServerPool(
            launcher,
            secured,
            publish=publisher.publish,
            weights_directory=weights_directory,
            traces=server_traces(config, run_dir),
            first_version=version,
        )
        offloaded = config.policy.offload.names and config.rollout.release_memory

        async def start_policy() -> None:
            await stack.enter_async_context(policy)
            if checkpoint is not None:
                await policy.call(LoadRequest(directory=str(checkpoint.policy_directory)))
                if config.algorithm.needs_critic:
                    await policy.call(LoadCriticRequest(directory=str(checkpoint.critic_directory)))

        with progress.phase("start"):
            if offloaded:  # the servers measure what is free of their devices, and take it
                await start_policy()
                await stack.enter_async_context(servers)
            else:
                await concurrently((start_policy(), stack.enter_async_context(servers)))
        for note in inputs.notes:
            progress.note(note)
        trajectory_log = stack.enter_context(
            TrajectoryLog(
                run_dir / "trajectories.jsonl",
                decode=inputs.renderer.decode,
                resume_after=resume_after,
            )
        )
        reference = None
        if config.algorithm.reference_addresses:
            reference = await stack.enter_async_context(connect_reference(config, inputs.renderer))
        trajectory_store = await stack.enter_async_context(
            TrajectoryStore(
                run_dir,
                decode=inputs.renderer.decode,
                max_bytes=config.run.trajectories_max_bytes,
                resume_after=resume_after,
            )
        )
        order = DataOrder(
            num_rows=len(inputs.train),
            batch_size=config.data.prompts_per_step,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
        )
        group_store = GroupStore(
            run_dir / GROUPS,
            tasks=partial(group_tasks, config, order, inputs.train),
            checkpoint=version,
            new=resume_after is None,
        )
        stack.callback(group_store.close)
        requirements = _requirements(config, inputs)
        await servers.connect(requirements)
        workers: LoopWorkers | None = None
        router: RunRouter | None = None
        if config.agent.num_workers:
            with progress.phase("start"):
                started = await stack.enter_async_context(
                    loop_workers(
                        launcher,
                        secured,
                        servers=servers.live,
                        requirements=requirements,
                        loops=inputs.loops,
                        images=inputs.images,
                    )
                )
                workers, router = started
                router.follow(servers)
                workers.follow(servers)
                workers.make_text_while(lambda: not trajectory_store.is_full)
        context = TrainingContext(
            config=config,
            train=inputs.train,
            val=inputs.val,
            order=order,
            estimator=find_estimator(config.algorithm),
            total_steps=total_steps(plan, len(inputs.train), progress),
            policy=policy,
            servers=servers,
            server_shares=ServerShares(
                lambda: servers.clients,
                lambda: servers.dead,
                partial(_occupied_s, servers, router),
            ),
            rollout=Rollout(
                config=config,
                servers=servers,
                renderer=inputs.renderer,
                rules=inputs.rules,
                reward=inputs.reward,
                workers=workers,
            ),
            reference=reference,
            memory_offload=_memory_offload(config, servers),
            checkpoints=checkpoints,
            metrics_log=metrics_log,
            trajectory_log=trajectory_log,
            trajectory_store=trajectory_store,
            decode=inputs.renderer.decode,
            notes_log=NotesLog(run_dir / "notes.jsonl", resume_after=resume_after),
            alert_log=AlertLog(run_dir / "alerts.jsonl", resume_after=resume_after),
            watch=Watch(read_metrics(run_dir / "metrics.jsonl")),
            loggers=loggers,
            progress=progress,
            run_metrics=run_metrics,
            report=report,
            group_store=group_store,
            resumed_groups=_resumed_groups(checkpoint, order.batch_size),
            on_step=own.on_step,
            batches=_batches(checkpoint),
            kl_coef=coefficient_after(
                config.algorithm.reward_kl, {} if checkpoint is None else checkpoint.metrics
            ),
        )
        if checkpoint is not None:
            if offloaded:  # the policy needs its memory to send the weights
                await context.release_memory()
            await context.sync_weights(checkpoint.step)
        await stack.enter_async_context(control_servers(servers, run_dir))
        exempt_present_objects()
        stack.callback(gc.unfreeze)
        yield context


async def _occupied_s(servers: ServerPool, router: RunRouter | None) -> Mapping[str, float]:
    """Returns for how long servers have had sessions, which are those of loop workers if any."""
    return servers.generator.occupied_s() if router is None else await router.occupied_s()


def total_steps(plan: Plan, num_train_rows: int, progress: Progress) -> int:
    """Returns the steps of the plan, less those of rows that were left out."""
    actual = replace(plan, num_train_rows=num_train_rows)
    if actual.total_steps != plan.total_steps:
        progress.note(
            f"{actual.total_steps} steps, not {plan.total_steps}: {num_train_rows} "
            f"of {plan.num_train_rows} training rows are left"
        )
    return actual.total_steps


def _batches(checkpoint: Checkpoint | None) -> int:
    """Returns the number of batches of rows before the next step; without the metric, of steps."""
    if checkpoint is None:
        return 0
    return int(checkpoint.metrics.get("data/batches", checkpoint.step))


def _resumed_groups(checkpoint: Checkpoint | None, batch_size: int) -> QueueState:
    """Returns where groups continue; after the synchronous schedule, with the next batch."""
    if checkpoint is None or checkpoint.groups is None:
        return QueueState(next_number=_batches(checkpoint) * batch_size)
    return QueueState.of(checkpoint.groups)


def policy_group(config: Config, launcher: Launcher, *, threads: int) -> PolicyGroup:
    """Returns the policy of a run, which is not started yet."""
    topology = make_topology(config.launch, config.policy, config.rollout)
    gpus = getattr(config.launch, "gpus_per_policy_rank", 0.0)
    devices = () if topology is None else topology.ranks
    return PolicyGroup(
        rank_starter(launcher, threads=threads, gpus=gpus, devices=devices),
        config.policy,
        config.model.path,
        with_reference=config.algorithm.keeps_reference,
        reference_path=config.algorithm.reference_path,
        own_devices=bool(gpus or devices),
        start_deadline_s=config.launch.start_deadline_s,
        critic=config.used_critic,
        tls=None if launcher.tls is None else launcher.tls.directory,
    )


def _requirements(config: Config, inputs: Inputs) -> Requirements:
    """Returns what every server must offer."""
    return Requirements(
        tokenizer_sha256=inputs.renderer.tokenizer_sha256,
        vocab_size=inputs.renderer.vocab_size,
        context_length=config.rollout.context_length,
        capabilities=required_capabilities(config)
        | ({"images"} if inputs.images else frozenset())
        | inputs.rules.loops.required_capabilities(inputs.loops),
    )


def _weights_directory(config: Config, run_dir: Path) -> Path:
    transport = config.sync.transport
    given = transport.directory if isinstance(transport, FileTransportConfig) else None
    return (given or run_dir / "weights").resolve()


def _memory_offload(config: Config, servers: ServerPool) -> MemoryOffload | None:
    rollout, sync = config.rollout, config.sync
    if not rollout.release_memory:
        return None
    return MemoryOffload(
        servers,
        multi_stage=rollout.multi_stage_wake_up,
        interrupt=sync.in_flight == "interrupt",
        max_attempts=sync.max_push_attempts,
    )
