"""The rollout: takes tasks, samples them on the server pool, and returns one trajectory per task.

Invariants:

1. The result has exactly one trajectory per task, in the order of the tasks, whatever order they
   ended in. Nothing downstream depends on timing.
2. Every token has the requested weight version, or a newer one.

When a server dies, the generator moves its sessions to the other servers. When the last one dies,
all tasks in flight are cancelled. Either way dead servers are then restarted with the present
weights, and tasks that failed through no fault of the model are attempted once more, with a new
deadline. If no server is left and none may be restarted, `NoServerLeftError` names them all.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from treadle.agent_loop import (
    AgentTask,
    ChatRenderer,
    Completion,
    PlacedImage,
    RequestContext,
    Retry,
    RewardFn,
    RolloutRunner,
    SamplingParams,
    Services,
    TokenGenerator,
    Trajectory,
)
from treadle.trainer.config.schema import Config
from treadle.trainer.data import PromptRules
from treadle.trainer.rollout.loops_from_config import loop_limits

__all__ = ["Rollout", "Servers"]

_log = logging.getLogger(__name__)

Key = tuple[str, int]


class Servers(Protocol):
    """What a rollout samples on: the run's `ServerPool`, or an `AttachedServer`."""

    @property
    def generator(self) -> TokenGenerator:
        """Samples on the servers."""
        ...

    @property
    def live(self) -> Sequence[object]:
        """The servers that are sampled from."""
        ...

    async def ensure_healthy(self) -> bool:
        """Replaces dead servers where it can; returns whether a server died or was restarted.

        Raises:
            NoServerLeftError: no server is left.
        """
        ...

    async def wait_until_all_ended(self) -> None:
        """Returns when no server is running any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Runs tasks on the server pool.

    Attributes:
        config: Of the run.
        servers: Connected.
        renderer: The model's chat format.
        rules: Have the loops, tools and interactions.
        reward: Scores each trajectory.
    """

    config: Config
    servers: Servers
    renderer: ChatRenderer
    rules: PromptRules
    reward: RewardFn

    async def run(
        self,
        tasks: Sequence[AgentTask],
        sampling: SamplingParams,
        *,
        min_weight_version: int,
        on_end: Callable[[Trajectory], None],
    ) -> list[Trajectory]:
        """Runs every task; calls `on_end` once for each trajectory, when it has ended.

        Raises:
            NoServerLeftError: no server is left.
            SetupError: a restarted server does not fit.
        """
        ended: dict[Key, Trajectory] = {}
        waiting = list(tasks)
        await self.servers.ensure_healthy()
        while waiting:

            async def keep(trajectory: Trajectory) -> None:
                ended[_key(trajectory.task)] = trajectory
                if not _may_be_retried(trajectory):
                    on_end(trajectory)

            await self._run_until_lost(waiting, sampling, keep, min_weight_version)
            if not await self.servers.ensure_healthy():
                break
            waiting = [
                task
                for task in tasks
                if (had := ended.get(_key(task))) is None or _may_be_retried(had)
            ]
            if waiting:
                _log.warning("attempting %d trajectories again", len(waiting))
        for trajectory in ended.values():
            if _may_be_retried(trajectory):  # but was not
                on_end(trajectory)
        return [ended[_key(task)] for task in tasks]

    async def _run_until_lost(
        self,
        tasks: Sequence[AgentTask],
        sampling: SamplingParams,
        sink: Callable[[Trajectory], Awaitable[None]],
        min_weight_version: int,
    ) -> None:
        """Runs the tasks; cancels those in flight and returns early when no server is alive."""
        with _Sessions(self.servers.generator) as generator:
            runner = self._runner(generator, sampling, min_weight_version)
            running = asyncio.create_task(runner.run(tasks, sink))
            lost = asyncio.create_task(self.servers.wait_until_all_ended())
            try:
                await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
            finally:
                for task in (running, lost):
                    task.cancel()
                await asyncio.wait({running, lost})
            if not lost.cancelled():
                lost.result()

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
            max_in_flight=self.config.rollout.max_in_flight * len(self.servers.live),
            deadline_s=self.config.agent.deadline_s,
            failure_policy=Retry(max_attempts=self.config.agent.max_attempts),
            watchdog_s=self.config.agent.watchdog_s,
        )


@dataclass(slots=True)
class _Sessions:
    """The pool's generator for one batch of tasks; finishes the sessions that a loop left open.

    The generator lives as long as the run, and an open session keeps its share of a replica.
    """

    generator: TokenGenerator
    _open: set[str] = field(default_factory=set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for session_id in list(self._open):
            self.finish_session(session_id)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """See `TokenGenerator.generate`."""
        self._open.add(request.session_id)
        return await self.generator.generate(prompt, params, request=request, images=images)

    def finish_session(self, session_id: str) -> None:
        """See `TokenGenerator.finish_session`."""
        self._open.discard(session_id)
        self.generator.finish_session(session_id)


def _key(task: AgentTask) -> Key:
    return task.task_id, task.rollout_index


def _may_be_retried(trajectory: Trajectory) -> bool:
    return trajectory.error is not None and trajectory.error.retryable
