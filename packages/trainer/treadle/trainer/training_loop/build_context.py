"""Builds the training context: from a plan and a run directory to a run ready for its first step.

Invariant: what was started is ended in reverse order when the context exits, for whatever reason.
Processes start together; the first failure cancels the rest.
"""

import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from treadle.agent_loop.aio import concurrently
from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.algorithms.reward_kl import coefficient_after
from treadle.policy.client.batch import MicroBatchRoom
from treadle.policy.client.group import PolicyGroup
from treadle.policy.config.weight_sync import FileTransportConfig
from treadle.policy.v1.checkpoint_service_pb2 import LoadCriticRequest, LoadRequest
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.trainer.checkpoint.run_directory import PROFILES, Checkpoint
from treadle.trainer.config.schema import Config
from treadle.trainer.data.order import make_order
from treadle.trainer.launch.garbage import exempt_present_objects
from treadle.trainer.launch.make_launcher import make_launcher
from treadle.trainer.launch.policy_group import policy_group
from treadle.trainer.launch.process import Launcher
from treadle.trainer.plan import Plan
from treadle.trainer.preflight import CheckedRun
from treadle.trainer.rollout.control.server_control import control_servers
from treadle.trainer.rollout.open_rollout import make_requirements, open_own_code, open_rollout
from treadle.trainer.rollout.served_reference import connect_reference
from treadle.trainer.rollout.server_pool import ServerPool, required_capabilities
from treadle.trainer.rollout.server_process import server_traces
from treadle.trainer.rollout.server_security import server_security, with_own_secrets
from treadle.trainer.rollout.workers.router import RunRouter
from treadle.trainer.time_shares.servers import ServerShares
from treadle.trainer.training_loop.context import TrainingContext, group_tasks
from treadle.trainer.training_loop.memory_offload import MemoryOffload
from treadle.trainer.training_loop.run_record import OpenRun, RunRecord
from treadle.trainer.training_loop.schedules.group_queue import QueueState
from treadle.trainer.training_loop.schedules.group_store import GROUPS, GroupStore

__all__ = ["build_context", "total_steps"]


@contextlib.asynccontextmanager
async def build_context(run: CheckedRun, opened: OpenRun) -> AsyncIterator[TrainingContext]:
    """Starts the processes, and restores the checkpoint.

    Args:
        run: With a configuration whose model is on this machine.

    Raises:
        ProcessError: A process did not start.
        PolicyError: The ranks cannot load the model or the checkpoint.
        SetupError: A server, a judge or a reference does not answer, or lacks what the run needs.
        NoServerLeftError: No server is left, and none may be started.
        WeightSyncError: No server took the checkpoint's weights.
        OSError: The run directory cannot be written.
    """
    config, inputs, run_dir, record = run.config, run.inputs, run.run_dir, opened.record
    checkpoint, resume_after = opened.resume.checkpoint, opened.resume.after
    async with contextlib.AsyncExitStack() as stack:
        await open_own_code(stack, config, inputs)
        launcher = await stack.enter_async_context(make_launcher(config, run_dir / "logs"))
        secured = stack.enter_context(with_own_secrets(config, run_dir, launcher.tls))
        policy, servers = await _start(stack, run, record, launcher, secured, checkpoint)
        for note in inputs.notes:
            record.show(note)
        reference = None
        if config.algorithm.reference_addresses:
            reference = await stack.enter_async_context(connect_reference(config, inputs.renderer))
        await stack.enter_async_context(
            record.keep_trajectories(
                config.run, run_dir, decode=inputs.renderer.decode, resume_after=resume_after
            )
        )
        order = make_order(
            inputs.train,
            config.data.weights,
            batch_size=config.data.prompts_per_step,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
        )
        group_store = GroupStore(
            run_dir / GROUPS,
            tasks=partial(group_tasks, config, order, inputs.train),
            checkpoint=0 if checkpoint is None else checkpoint.step,
            new=resume_after is None,
        )
        stack.callback(group_store.close)
        requirements = make_requirements(config, inputs, required_capabilities(config))
        await servers.connect(requirements)
        with record.phase("start"):
            rollout, router = await open_rollout(
                stack,
                config,
                inputs,
                launcher=launcher,
                secured=secured,
                servers=servers,
                requirements=requirements,
            )
        if rollout.workers is not None:
            rollout.workers.make_text_while(lambda: not record.trajectory_store.is_full)
        context = TrainingContext(
            config=config,
            train=inputs.train,
            val=inputs.val,
            order=order,
            estimator=find_estimator(config.algorithm),
            total_steps=total_steps(run.plan, len(inputs.train), record.show),
            policy=policy,
            servers=servers,
            server_shares=_server_shares(servers, router),
            rollout=rollout,
            reference=reference,
            memory_offload=_memory_offload(config, servers),
            checkpoints=opened.checkpoints,
            record=record,
            group_store=group_store,
            resumed_groups=_resumed_groups(checkpoint, order.batch_size),
            room=MicroBatchRoom(config.policy),
            batches=_batches(checkpoint),
            kl_coef=coefficient_after(
                config.algorithm.reward_kl, {} if checkpoint is None else checkpoint.metrics
            ),
        )
        if checkpoint is not None:
            if config.policy.offload.names:  # the policy needs its memory to send the weights
                await context.release_memory()
            await context.sync_weights(checkpoint.step)
        await stack.enter_async_context(control_servers(servers, run_dir))
        exempt_present_objects()
        stack.callback(gc.unfreeze)
        yield context


async def _start(
    stack: contextlib.AsyncExitStack,
    run: CheckedRun,
    record: RunRecord,
    launcher: Launcher,
    secured: Config,
    checkpoint: Checkpoint | None,
) -> tuple[PolicyGroup, ServerPool]:
    """Starts the policy, from the checkpoint if there is one, and the servers."""
    config = run.config
    policy = policy_group(
        config,
        launcher,
        threads=run.plan.policy_threads,
        profiles=run.run_dir / PROFILES,
    )
    version = 0 if checkpoint is None else checkpoint.step
    servers = _servers(run, launcher, secured, policy, first_version=version)

    async def start_policy() -> None:
        await stack.enter_async_context(policy)
        if checkpoint is not None:
            await policy.call(LoadRequest(directory=str(checkpoint.policy_directory)))
            if config.algorithm.needs_critic:
                await policy.call(LoadCriticRequest(directory=str(checkpoint.critic_directory)))

    with record.phase("start"):
        if config.policy.offload.names and config.rollout.release_memory:
            # The servers measure what is free of their devices, and take it.
            await start_policy()
            await stack.enter_async_context(servers)
        else:
            await concurrently((start_policy(), stack.enter_async_context(servers)))
    return policy, servers


def _servers(
    run: CheckedRun, launcher: Launcher, secured: Config, policy: PolicyGroup, *, first_version: int
) -> ServerPool:
    config = run.config
    weights_directory = _weights_directory(config, run.run_dir)
    publisher = WeightPublisher(
        policy,
        config.sync,
        element_type=config.rollout.dtype,
        directory=weights_directory,
        security=server_security(secured.rollout),
    )
    return ServerPool(
        launcher,
        secured,
        publish=publisher.publish,
        weights_directory=weights_directory,
        traces=server_traces(config, run.run_dir),
        first_version=first_version,
    )


def _server_shares(servers: ServerPool, router: RunRouter | None) -> ServerShares:
    """Returns what measures the servers' time; their sessions are those of loop workers if any."""

    async def occupied_s() -> Mapping[str, float]:
        return servers.generator.occupied_s() if router is None else await router.occupied_s()

    return ServerShares(lambda: servers.clients, lambda: servers.dead, occupied_s)


def total_steps(plan: Plan, num_train_rows: int, show: Callable[[str], None]) -> int:
    """Returns the steps of the plan, less those of rows that were left out."""
    actual = replace(plan, num_train_rows=num_train_rows)
    if actual.total_steps != plan.total_steps:
        show(
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
