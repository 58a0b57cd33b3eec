"""The rollout: takes tasks, samples them on the server pool, and returns one trajectory per task.

Invariants:

1. The result has exactly one trajectory per task, in the order of the tasks, whatever order they
   ended in. Nothing downstream depends on timing. Only where `check_outages` raises, tasks may be
   missing: they were cancelled.
2. Every token has the requested weight version, or a newer one.

When a server dies, the generator moves its sessions to the other servers, and the server is
restarted with the present weights meanwhile; one that is added is let in meanwhile too. When the
last one dies, all tasks in flight are cancelled. Either way tasks that failed through no fault of
the model are attempted once more, with a new deadline. If no server is left and none may be
restarted, `NoServerLeftError` names them all.

What else trajectories need, a sandbox or a judge, may be down too (`outages`). Once all tasks have
ended, the rollout waits for it, and attempts again what failed because of it. What never served is
not waited for, and ends the rollout at once.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from treadle.agent_loop import (
    AgentLoopError,
    AgentTask,
    ChatRenderer,
    RewardError,
    RewardFn,
    SamplingParams,
    TokenGenerator,
    Trajectory,
    TrajectoryTimeoutError,
)
from treadle.tools.rewards import WeightedRewards
from treadle.trainer.config.schema import Config
from treadle.trainer.data import PromptRules
from treadle.trainer.report.failures import causes, of_own_code
from treadle.trainer.rollout.make_runner import (
    Runner,
    RunnerSettings,
    Sink,
    SpanAttributes,
    make_runner,
)
from treadle.trainer.rollout.open_sessions import OpenSessions
from treadle.trainer.rollout.outages import OutageError, Outages, failed_source
from treadle.trainer.rollout.workers.pool import LoopWorkers

if TYPE_CHECKING:
    from treadle.trainer.rollout.rotation import Routes

__all__ = [
    "Rollout",
    "Servers",
    "failed_by",
    "may_be_attempted_again",
    "may_be_retried",
]

_log = logging.getLogger(__name__)

Key = tuple[str, int]


class Servers(Protocol):
    """The servers that a rollout samples on: the run's `ServerPool`, or servers of others."""

    @property
    def generator(self) -> TokenGenerator:
        """Samples on the servers."""
        ...

    @property
    def live(self) -> Sequence[object]:
        """The servers that are sampled from."""
        ...

    def on_change(self, listener: "Callable[[Routes], None]") -> Callable[[], None]:
        """Tells a listener the routes, now and after each change; returns what ends that."""
        ...

    async def ensure_healthy(self) -> bool:
        """Replaces dead servers where it can; returns whether a server died or was restarted.

        Raises:
            NoServerLeftError: No server is left.
        """
        ...

    async def wait_for_change(self) -> None:
        """Returns when `ensure_healthy` could replace a server or let one in."""
        ...

    async def wait_until_all_ended(self) -> None:
        """Returns when no server is running any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Runs tasks on the server pool.

    Attributes:
        rules: Have the loops, tools and interactions.
        workers: Run the tasks, with their own loops, tools and rewards; None: this process does.
        comparing: Limits how many groups are with the rewards of whole groups at a time.
    """

    _FIRST_PAUSE_S: ClassVar[float] = 1.0
    _LONGEST_PAUSE_S: ClassVar[float] = 30.0

    config: Config
    servers: Servers
    renderer: ChatRenderer
    rules: PromptRules
    reward: RewardFn
    outages: Outages = field(default_factory=Outages)
    workers: LoopWorkers | None = None
    comparing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(16))

    async def run(
        self,
        tasks: Sequence[AgentTask],
        sampling: SamplingParams,
        *,
        min_weight_version: int,
        on_end: Callable[[Trajectory], None],
        routed_experts: bool = False,
    ) -> list[Trajectory]:
        """Runs every task; returns one trajectory per task, in the order of the tasks.

        Where something is down that never served, it returns the trajectories that have ended, and
        `check_outages` raises.

        Args:
            tasks: To run; no two have the same id and rollout index.
            min_weight_version: Oldest weights that may sample.
            on_end: Called once for each trajectory, when it has ended.
            routed_experts: Whether trajectories have the experts of their rows.

        Raises:
            NoServerLeftError: No server is left.
            SetupError: A restarted server does not fit.
        """
        settings = RunnerSettings(
            sampling=sampling,
            min_weight_version=min_weight_version,
            routed_experts=routed_experts,
        )
        ended: dict[Key, Trajectory] = {}
        waiting = list(tasks)

        async def keep(trajectory: Trajectory) -> None:
            ended[_key(trajectory.task)] = trajectory
            self.outages.count(trajectory)
            if not may_be_attempted_again(trajectory):
                on_end(trajectory)
            self.check_outages([trajectory])

        disturbed = False

        async def attempt(some: Sequence[AgentTask], sink: Sink) -> None:
            nonlocal disturbed
            runner = partial(self.runner, settings=settings)
            disturbed |= await self.run_until_lost(some, runner, sink, replacing=True)

        await self.servers.ensure_healthy()
        with contextlib.suppress(OutageError):
            while waiting:
                disturbed = False
                await attempt(waiting, keep)
                disturbed |= await self.servers.ensure_healthy()
                serve_again = [
                    source
                    for source in self.down(ended.values(), len(tasks))
                    if await self.wait_for(source, failed_by(source, ended.values()), attempt, keep)
                ]
                if not disturbed and not serve_again:
                    break
                waiting = _to_attempt(tasks, ended, serve_again, disturbed=disturbed)
        for trajectory in ended.values():
            if may_be_attempted_again(trajectory):  # but was not
                on_end(trajectory)
        return await self.compared([ended[_key(task)] for task in tasks if _key(task) in ended])

    async def compared(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Returns them with what rewards of whole groups give; members of a row are adjacent."""
        if not self.compares:
            return list(trajectories)
        groups = itertools.groupby(trajectories, key=lambda t: t.task.task_id)
        done = await asyncio.gather(*(self._compared(tuple(members)) for _, members in groups))
        return [trajectory for members in done for trajectory in members]

    async def _compared(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Compares one group, again and again up to `agent.outage_s` while its reward is down."""
        reward, agent = self.reward, self.config.agent
        assert isinstance(reward, WeightedRewards), "it compares"
        clock = asyncio.get_running_loop().time
        began: float | None = None
        pause_s = self._FIRST_PAUSE_S
        while True:
            async with self.comparing:  # the time limit begins when the reward is called
                done = await reward.of_group(group, deadline_s=agent.deadline_s)
            pairs = zip(group, done, strict=True)
            down = [t for was, t in pairs if was.error is None and _is_down(t.error)]
            if not down or agent.max_consecutive_failures is None:
                return done
            if began is None:
                began = clock()
                text = f"waiting up to {agent.outage_s:g} s for it (agent.outage_s)"
                _log.warning("a reward of whole groups failed (%s); %s", down[0].error, text)
            if clock() + pause_s > began + agent.outage_s:
                for trajectory in down:
                    self.outages.count(trajectory)
                sources = (failed_source(trajectory.error) for trajectory in down)
                self.outages.given_up.update(source for source in sources if source is not None)
                return done
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._LONGEST_PAUSE_S)

    @property
    def compares(self) -> bool:
        """Whether a reward takes whole groups: then a trajectory that ends lacks its part."""
        return isinstance(self.reward, WeightedRewards) and self.reward.compares

    def check_outages(self, ended: Sequence[Trajectory]) -> None:
        """Looks whether something is down that trajectories need.

        Raises:
            OutageError: It is, and has never served or was given up.
        """
        limit, limit_s = self.config.agent.max_consecutive_failures, self.config.agent.outage_s
        for source in self.outages.down(limit) | self.outages.given_up:
            if not (failed := failed_by(source, ended)):
                continue
            if source in self.outages.given_up:
                why = f"did not serve within {limit_s:g} s (agent.outage_s) either"
            elif source not in self.outages.served:
                why = "never served one (agent.max_consecutive_failures)"
            else:
                continue
            text = self.outages.describe(source, causes(failed))
            raise OutageError(f"{text}, and {why}. Correct it, and give the same command again")

    def down(self, ended: Iterable[Trajectory], num_tasks: int) -> list[str]:
        """Returns the sources to wait for: those that had served and now fail trajectories."""
        failed = {source for t in ended if (source := failed_source(t.error)) is not None}
        if not failed or (limit := self.config.agent.max_consecutive_failures) is None:
            return []
        down = self.outages.down(min(limit, num_tasks)) - self.outages.given_up
        return sorted(failed & self.outages.served & down)

    async def wait_for(
        self,
        source: str,
        failed: Sequence[Trajectory],
        attempt: Callable[[Sequence[AgentTask], Sink], Awaitable[None]],
        keep: Sink,
    ) -> bool:
        """Tries the failed trajectories in turn, one now and then, until the source serves one.

        Those of different rows come first: it may be the row that always fails.

        Args:
            failed: Trajectories that failed because of it; at least one.
            attempt: Runs tasks, and passes their trajectories to a sink.
            keep: Takes the first trajectory that the source served.

        Returns:
            Whether it did within `agent.outage_s`.
        """
        limit_s = self.config.agent.outage_s
        text = self.outages.describe(source, causes(failed))
        _log.warning("%s; waiting up to %g s for it (agent.outage_s)", text, limit_s)
        clock = asyncio.get_running_loop().time
        began, pause_s = clock(), self._FIRST_PAUSE_S
        served: list[Trajectory] = []
        in_turn = itertools.cycle(sorted((t.task for t in failed), key=lambda t: t.rollout_index))

        async def take(trajectory: Trajectory) -> None:
            late = isinstance(trajectory.error, TrajectoryTimeoutError)
            if not late and not may_be_attempted_again(trajectory):
                served.append(trajectory)

        while not served:
            if clock() + pause_s > began + limit_s:
                self.outages.given_up.add(source)
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._LONGEST_PAUSE_S)
            await attempt([next(in_turn)], take)
            await self.servers.ensure_healthy()
        _log.warning("%s serves again, after %.3g s", source, clock() - began)
        self.outages.serves(source)
        await keep(served[0])
        return True

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics of the loop workers since the last call; without workers, none."""
        return {} if self.workers is None else self.workers.take_metrics()

    async def run_until_lost(
        self,
        tasks: AsyncIterable[AgentTask] | Iterable[AgentTask],
        runner: Callable[[TokenGenerator], Runner],
        sink: Sink,
        *,
        replacing: bool = False,
    ) -> bool:
        """Runs the tasks; cancels those in flight and returns early when no server is alive.

        Args:
            replacing: Whether dead servers are replaced, and others let in, meanwhile. The policy
                must hold the present weights all the time, and nobody else call the servers.

        Returns:
            Whether a server died, was waited for or joined meanwhile.

        Raises:
            NoServerLeftError: No server is left.
            SetupError: A restarted server does not fit.
        """
        disturbed = False
        with OpenSessions(self.servers.generator) as generator:
            made = runner(generator)
            stop_listening = self.servers.on_change(partial(self._follow, made))
            running = asyncio.create_task(made.run(tasks, sink))
            lost = asyncio.create_task(self.servers.wait_until_all_ended())
            try:
                while True:
                    changed = asyncio.create_task(self._changed(replacing))
                    waits: set[asyncio.Task[Any]] = {running, lost, changed}
                    try:
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        changed.cancel()
                    if running.done() or lost.done():
                        break
                    disturbed |= await self.servers.ensure_healthy()
                if running.done():
                    running.result()
            finally:
                stop_listening()
                for task in (running, lost):
                    task.cancel()
                await asyncio.wait({running, lost})
            if not lost.cancelled():
                lost.result()
        return disturbed

    async def _changed(self, replacing: bool) -> None:
        """Returns when a server may be replaced or let in, if that is done at all."""
        if not replacing:
            await asyncio.Event().wait()
        await self.servers.wait_for_change()

    def _follow(self, runner: Runner, routes: "Routes") -> None:
        """Lets as many tasks be in flight as the servers that take new sessions serve."""
        runner.set_max_in_flight(self.config.rollout.max_in_flight * len(routes.serving))

    def runner(
        self,
        generator: TokenGenerator,
        settings: RunnerSettings,
        *,
        span_attributes: SpanAttributes | None = None,
    ) -> Runner:
        """Returns what runs tasks with this rollout's loops and limits.

        Args:
            generator: Samples the completions, unless there are workers, which have their own.
        """
        max_in_flight = self.config.rollout.max_in_flight * len(self.servers.live)
        if self.workers is not None:
            return self.workers.runner(
                settings, max_in_flight=max_in_flight, span_attributes=span_attributes
            )
        return make_runner(
            self.config,
            settings,
            generator=generator,
            renderer=self.renderer,
            rules=self.rules,
            reward=self.reward,
            max_in_flight=max_in_flight,
            span_attributes=span_attributes,
        )


def _to_attempt(
    tasks: Sequence[AgentTask],
    ended: Mapping[Key, Trajectory],
    serve_again: Sequence[str],
    *,
    disturbed: bool,
) -> list[AgentTask]:
    """Returns the tasks that have not ended, or failed through what serves again."""
    waiting = [
        task
        for task in tasks
        if (had := ended.get(_key(task))) is None
        or (disturbed and may_be_retried(had))
        or failed_source(had.error) in serve_again
    ]
    if waiting:
        _log.warning("attempting %d trajectories again", len(waiting))
    return waiting


def _key(task: AgentTask) -> Key:
    return task.task_id, task.rollout_index


def failed_by(source: str, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Returns the trajectories that failed because of a source."""
    return [t for t in trajectories if failed_source(t.error) == source]


def _is_down(error: AgentLoopError | None) -> bool:
    """Returns whether a reward failed for a reason that may pass, and not by a bug in it."""
    return isinstance(error, RewardError) and not of_own_code(error)


def may_be_retried(trajectory: Trajectory) -> bool:
    """Returns whether it failed for a reason that a healthy server may not have."""
    return trajectory.error is not None and trajectory.error.retryable


def may_be_attempted_again(trajectory: Trajectory) -> bool:
    """Returns whether it failed through no fault of the model."""
    return may_be_retried(trajectory) or failed_source(trajectory.error) is not None
