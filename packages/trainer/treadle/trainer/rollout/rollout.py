"""The rollout: tasks in, one trajectory for each out, sampled by the replicas.

Invariant: the result holds exactly one trajectory per task, in the order of the tasks, whatever
order they ended in; nothing downstream depends on timing. Every token is of the weight version
asked for, or newer.

A replica that dies while tasks run: the client moves its sessions to the others. If none is left,
or one dies before the client has reached it, the tasks under way are cancelled. Either way dead
replicas are then started again and given the present weights, and tasks that failed through no
fault of the model are attempted once more, with a new deadline; when no replica is left and none
may be started, `ReplicasLostError` names them all.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from treadle.agent_loop import (
    AgentTask,
    ChatRenderer,
    Retry,
    RewardFn,
    RolloutRunner,
    SamplingParams,
    Services,
    SetupError,
    StickySession,
    TokenGenerator,
    Trajectory,
)
from treadle.agent_loop.rpc import ChannelSecurity, Requirements, connect
from treadle.trainer.config.schema import RunConfig
from treadle.trainer.data import PromptRules
from treadle.trainer.rollout.loops_from_config import loop_limits
from treadle.trainer.rollout.server_pool import ReplicaSet
from treadle.trainer.rollout.server_security import ServerSecurity

__all__ = ["Republish", "Rollout", "needed_capabilities"]

_LOOK_EVERY_S = 0.5
_log = logging.getLogger(__name__)

Key = tuple[str, int]
Republish = Callable[[Sequence[str]], Awaitable[None]]


def needed_capabilities(config: RunConfig) -> frozenset[str]:
    """What the servers of a run must be able to do, by the names in the contract."""
    needed = {"sampled_logprobs", f"{config.sync.transport.kind}_transport"}
    if config.sync.updates_in_place:
        needed.add("in_place_update")
    if config.sync.in_flight == "continue":
        needed.add("in_flight_continue")
    if config.rollout.release_memory:
        needed.add("release_memory")
    return frozenset(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Runs tasks on the replicas.

    Attributes:
        config: Of the run.
        replicas: The servers.
        renderer: The model's chat format.
        requirements: What the servers must offer.
        rules: Have the loops, tools and interactions.
        reward: Scores each trajectory.
        republish: Gives the present weights to the replicas of these names, which have just been
            started again.
    """

    config: RunConfig
    replicas: ReplicaSet
    renderer: ChatRenderer
    requirements: Requirements
    rules: PromptRules
    reward: RewardFn
    republish: Republish

    async def check_servers(self) -> None:
        """Compares what the servers are with what the run needs, before anything is sampled.

        Raises:
            SetupError: one of them does not fit; tokenizer, vocabulary, context, capabilities.
        """
        async with connect(
            self.replicas.addresses, requirements=self.requirements, security=self._security
        ):
            pass

    async def run(
        self,
        tasks: Sequence[AgentTask],
        sampling: SamplingParams,
        *,
        min_weight_version: int,
        on_end: Callable[[], None],
    ) -> list[Trajectory]:
        """Runs every task; `on_end` is called for each trajectory that ends.

        Raises:
            ReplicasLostError: no replica is left.
            SetupError: replicas and renderer do not fit.
        """
        ended: dict[Key, Trajectory] = {}
        waiting = list(tasks)
        await self.heal()
        while waiting:

            async def keep(trajectory: Trajectory) -> None:
                ended[_key(trajectory.task)] = trajectory
                if not _may_go_again(trajectory):
                    on_end()

            try:
                await self._run_until_lost(waiting, sampling, keep, min_weight_version)
            except SetupError:  # a replica that died before the handshake is no misfit
                if not await self.heal():
                    raise
            else:
                if not await self.heal():
                    break
            waiting = [
                task
                for task in tasks
                if (had := ended.get(_key(task))) is None or _may_go_again(had)
            ]
            if waiting:
                _log.warning("attempting %d trajectories again", len(waiting))
        for trajectory in ended.values():
            if _may_go_again(trajectory):  # it did not get to
                on_end()
        return [ended[_key(task)] for task in tasks]

    async def heal(self) -> bool:
        """Replaces replicas that died; whether any had to be.

        Raises:
            ReplicasLostError: no replica is left.
        """
        died = await self.replicas.look()
        revived = await self.replicas.revive()
        if revived:
            await self.republish(revived)
        return bool(died or revived)

    async def _run_until_lost(
        self,
        tasks: Sequence[AgentTask],
        sampling: SamplingParams,
        sink: Callable[[Trajectory], Awaitable[None]],
        min_weight_version: int,
    ) -> None:
        """Runs the tasks; returns early, with some of them not ended, if `_lost` does."""
        connected = asyncio.Event()

        async def run() -> None:
            policy = StickySession(cache_tokens=self.config.rollout.cache_tokens)
            async with connect(
                self.replicas.addresses,
                requirements=self.requirements,
                security=self._security,
                policy=policy,
            ) as generator:
                connected.set()
                await self._runner(generator, sampling, min_weight_version).run(tasks, sink)

        running = asyncio.create_task(run())
        watching = asyncio.create_task(self._lost(connected))
        try:
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            for task in (running, watching):
                task.cancel()
            await asyncio.wait({running, watching})
        if not watching.cancelled():
            watching.result()

    def _runner(
        self, generator: TokenGenerator, sampling: SamplingParams, min_weight_version: int
    ) -> RolloutRunner:
        return RolloutRunner(
            self.rules.loops,
            Services(
                generator=generator,
                renderer=self.renderer,
                limits=loop_limits(self.config),
                sampling=sampling,
                tools=self.rules.tools,
                interactions=self.rules.interactions,
                reward=self.reward,
                min_weight_version=min_weight_version,
            ),
            max_in_flight=self.config.rollout.max_in_flight * len(self.replicas.live),
            deadline_s=self.config.agent.deadline_s,
            failure_policy=Retry(max_attempts=self.config.agent.max_attempts),
            watchdog_s=self.config.agent.watchdog_s,
        )

    @property
    def _security(self) -> ChannelSecurity:
        return ServerSecurity.of(self.config.rollout).read()

    async def _lost(self, connected: asyncio.Event) -> None:
        """Returns when no replica is alive, or when one is not that is still to be connected to.

        The client gives a server that does not answer the time to start; these have started.
        """
        while True:
            alive = [await replica.process.poll() is None for replica in self.replicas.live]
            if not any(alive) or not (connected.is_set() or all(alive)):
                return
            await asyncio.sleep(_LOOK_EVERY_S)


def _key(task: AgentTask) -> Key:
    return task.task_id, task.rollout_index


def _may_go_again(trajectory: Trajectory) -> bool:
    return trajectory.error is not None and trajectory.error.retryable
