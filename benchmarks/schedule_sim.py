"""A training run in simulated time: schedule, server pool and router of a run, simulated servers.

A run's own code: the rules of the schedules (`schedules/rules.py`) and their queue of groups;
`ServerPool`, which starts the servers, shakes hands, looks at them, replaces those that die, and
gives weights (`UpdateRound`); the routing service, its queue and policy, which `RunRouter` tells of
the servers. Simulated are processes, calls and bytes (`simulated_cluster`), and the times of
servers and tools (`routing_sim`). All share one clock (`simulated_time`).

The moves are those of a run that samples beside training: the pool is looked at before a step waits
for its batch, and whenever a server ended or has started while it waits. A step of training takes
`train_s`, after which its weights travel for `sync_s`; completions continue meanwhile, as with
`sync.in_flight=continue`. As many sessions are in flight as servers serve, times `per_server`.

Servers die at equal intervals. A call at one that dies is sent again, to another server; so is one
for which the router names a dead server, because the pool has not noticed yet. As clients do, the
sessions leave a server out for a while at which a call failed. A call that comes to a server with
older weights than the pool's is an error: the simulation ends.

Means are over the steps from the second on, without the last two: the first one fills the queues,
and towards the end no group begins that no step would train on.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from routing_sim import Cost, Event, Live, Request, Session, Simulation
from routing_trace import COMMON_TOKENS, GROUP_SIZE
from simulated_cluster import Cluster, Publisher
from simulated_time import run

from treadle.agent_loop.rpc import Requirements, RetryPolicy
from treadle.agent_loop.rpc.retry import Backoff
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config, DataConfig, ModelConfig
from treadle.trainer.rollout.rotation import Routes
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.rollout.workers.router import RunRouter
from treadle.trainer.training_loop.groups import Group
from treadle.trainer.training_loop.schedules.group_queue import GroupQueue, Rule, Waiting
from treadle.trainer.training_loop.schedules.rules import AsyncRule, OverlapRule, StreamRule

__all__ = ["SCHEDULES", "Run", "Training", "run_training"]

T = TypeVar("T")
_FIRST_COUNTED, _LAST_STEPS = 2, 2
_RETRY = RetryPolicy(jitter=0.0)
_ASK_AGAIN_S = 1.0
"""As clients do that hear of no replica."""


class SyncRule:
    """Rollout and training take turns, as `run_sync` has it."""

    leaves_out = False

    def may_start(self, queue: GroupQueue) -> bool:
        """Returns whether the next group is of the step that samples."""
        return not queue.training and queue.next_number < (queue.version + 1) * queue.size

    def batch(self, queue: GroupQueue) -> Sequence[int] | None:
        """Returns the groups of the step's rows when all of them have ended."""
        return OverlapRule().batch(queue)


SCHEDULES: dict[str, Callable[[], Rule]] = {
    "sync": SyncRule,
    "overlap": OverlapRule,
    "stream": lambda: StreamRule(surplus=1.0),
    "async": lambda: AsyncRule(max_staleness=1),
}
"""By name; with half of all groups in the step that trains, the last two may run as many more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The settings of a run.

    Attributes:
        servers: Number of servers.
        groups: That a step trains on.
        steps: Number of steps, at least 4.
        train_s: Seconds of the policy's update.
        sync_s: Seconds that new weights travel to the servers.
        per_server: Sessions in flight for each server that serves.
        death_s: Seconds from one server's end to the next one's.
        start_s: Seconds until a server that was started serves.
    """

    servers: int
    groups: int
    steps: int
    train_s: float
    sync_s: float
    per_server: int
    death_s: float
    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results of a run.

    Attributes:
        trajectories_per_hour: Trained on.
        turns_per_s: Completions that were asked for, each once.
        step_s: Mean seconds of a step.
        utilisation: Sequences that run over the places of all servers.
        idle: Share of the servers' time in which nothing ran.
        policy_waits: Share of the time in which the policy waited for a batch.
        staleness: Staleness of a group -> share of the trained groups.
        most_held: Greatest number of sessions that run, wait or are in the step that trains.
        most_held_tokens: Of all of them together.
        died: Number of servers that died.
        joined: Number of servers that were started again and served with the weights of the moment.
        sent_again: Calls that were at a server that died, or came to it before the router knew.
        decisions: Of the schedule: may a group start, is there a batch.
        decision_s: CPU seconds that they took together.
        placements: Of the router: a session's turns and its end.
        placement_s: CPU seconds that they took together.
        run_s: Seconds of all steps.
    """

    trajectories_per_hour: float
    turns_per_s: float
    step_s: float
    utilisation: float
    idle: float
    policy_waits: float
    staleness: dict[int, float]
    most_held: int
    most_held_tokens: int
    died: int
    joined: int
    sent_again: int
    decisions: int
    decision_s: float
    placements: int
    placement_s: float
    run_s: float

    @property
    def schedule_share(self) -> float:
        """CPU seconds of the schedule per second of the run."""
        return self.decision_s / self.run_s


def run_training(rule: Rule, training: Training, trace: Sequence[Session], cost: Cost) -> Run:
    """Trains all steps; the trace has the sessions of all groups, those of a group adjacent."""
    return run(_train(rule, training, trace, cost))


async def _train(rule: Rule, training: Training, trace: Sequence[Session], cost: Cost) -> Run:
    cluster = Cluster(start_s=training.start_s)
    config = Config(
        data=DataConfig(train_files=(Path("rows.jsonl"),)),
        model=ModelConfig(path=Path("model")),
        rollout=RolloutConfig(num_replicas=training.servers, max_restarts=1 << 30),
    )
    publisher = Publisher(config=config.sync, send_s=training.sync_s)
    with cluster.network.carrying_calls():
        async with (
            ServerPool(cluster.launcher, config, publish=publisher.publish) as pool,
            RunRouter(cluster.launcher, config, on_lost=_raise) as router,
        ):
            await pool.connect(Requirements())
            await router.start([server.address for server in pool.live])
            router.follow(pool)
            return await _Training(rule, training, trace, cost, cluster, pool).train()


def _raise(error: Exception) -> None:
    raise error


def _raise_its_error(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        task.result()


class _Timed:
    """Counts decisions, and the CPU seconds that they take."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def decide(self, decision: Callable[[], T]) -> T:
        begun = time.process_time_ns()
        answer = decision()
        self.seconds += (time.process_time_ns() - begun) * 1e-9
        self.count += 1
        return answer


class _Placement:
    """The run's router as a policy of the simulation, asked by one worker.

    Args:
        cluster: Where the router and the servers are.

    Attributes:
        version: Of the weights that every call asks for at least, as loop workers are told it.
        sent_again: Calls that failed at a server that died.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.version = 0
        self.sent_again = 0
        self.decisions = _Timed()
        self._backoffs: dict[str, Backoff] = {}

    def pick(self, request: Request) -> int | None:
        """Asks the router, and again where the server of its answer does not answer."""
        queue, name = self._cluster.queue, str(request.session.index)
        now = asyncio.get_running_loop().time()
        while True:
            avoid = {address for address, each in self._backoffs.items() if each.until > now}
            address = self.decisions.decide(
                partial(queue.open_now, name, context_tokens=request.prompt_tokens, avoid=avoid)
            )
            if address is None:
                return None
            if (server := self._cluster.servers.get(address)) is not None:
                assert server.weight_version >= self.version, "it serves with older weights"
                return server.number
            self.failed(address, 1)

    def failed(self, address: str, calls: int) -> None:
        """Leaves a server out for a while, at which calls have failed."""
        self.sent_again += calls
        now = asyncio.get_running_loop().time()
        self._backoffs.setdefault(address, Backoff()).fail(now, _RETRY, None)

    def follow(self, routes: Routes) -> None:
        """Forgets the servers that have gone, and asks for the weights of now."""
        self.version = routes.weight_version
        for address in self._backoffs.keys() - set(routes.serving):
            del self._backoffs[address]

    def done(self, request: Request) -> None:
        """Its load is sessions, not requests."""

    def finish(self, session: Session) -> None:
        """Frees the place."""
        queue, name = self._cluster.queue, str(session.index)
        self.decisions.decide(partial(queue.close, name))


class _Training(Simulation):
    """A simulation whose sessions are begun by a schedule, and whose servers are a pool's."""

    def __init__(
        self,
        rule: Rule,
        training: Training,
        trace: Sequence[Session],
        cost: Cost,
        cluster: Cluster,
        pool: ServerPool,
    ) -> None:
        self._placement = _Placement(cluster)
        super().__init__(
            (),
            self._placement,
            cost=cost,
            num_engines=training.servers,
            max_in_flight=0,
            common_tokens=COMMON_TOKENS,
        )
        self._loop = asyncio.get_running_loop()
        self._now = self._began = self._loop.time()
        self._training = training
        self._trace = trace
        self._cluster = cluster
        self._pool = pool
        self._queue = GroupQueue(rule=rule, size=training.groups, total_steps=training.steps)
        self._schedule = _Timed()
        self._group_ended = asyncio.Event()
        self._begun: list[Session] = []  # of the group that starts: they wait for a place
        self._left: dict[int, int] = {}  # group that runs -> sessions that have not ended
        self._in_flight = 0
        self._waits = self._is_over = self._asks_again = False
        self._waited_s = self._counted_s = 0.0
        self._turns = self._died = 0
        self._staleness: Counter[int] = Counter()
        self._held: Counter[int] = Counter()  # group -> tokens of its sessions
        self._held_tokens = self._most_held = self._most_held_tokens = 0

    async def train(self) -> Run:
        """Trains all steps."""
        stop_listening = self._pool.on_change(self._follow)
        dying = asyncio.create_task(self._die())
        dying.add_done_callback(_raise_its_error)
        for step in range(1, self._training.steps + 1):
            batch = await self._take()
            if self._is_counted():
                self._staleness.update(step - 1 - waiting.birth for waiting in batch)
            await asyncio.sleep(self._training.train_s)
            await self._pool.sync_weights(step)
            self._pass_time(self._loop.time())
            for waiting in batch:
                self._held_tokens -= self._held.pop(waiting.number)
            self._queue.published(step)
            self._fill()
        self._is_over = True
        dying.cancel()
        stop_listening()
        return self._run()

    def _run(self) -> Run:
        replay = self._replay()
        counted = sum(self._staleness.values())
        return Run(
            trajectories_per_hour=3600 * counted * GROUP_SIZE / self._counted_s,
            turns_per_s=self._turns / self._counted_s,
            step_s=self._counted_s * self._training.groups / counted,
            utilisation=replay.utilisation,
            idle=replay.idle,
            policy_waits=self._waited_s / self._counted_s,
            staleness={age: n / counted for age, n in sorted(self._staleness.items())},
            most_held=self._most_held * GROUP_SIZE,
            most_held_tokens=self._most_held_tokens,
            died=self._died,
            joined=int(self._pool.take_metrics()["servers/restarted"]),
            sent_again=self._placement.sent_again,
            decisions=self._schedule.count,
            decision_s=self._schedule.seconds,
            placements=self._placement.decisions.count,
            placement_s=self._placement.decisions.seconds,
            run_s=self._loop.time() - self._began,
        )

    # The clock

    def _at(self, when: float, event: Event) -> None:
        self._loop.call_at(when, self._pass_and_happen, event)

    def _pass_and_happen(self, event: Event) -> None:
        if not self._is_over:
            self._pass_time(self._loop.time())
            self._happen(event)

    def _is_counted(self) -> bool:
        return _FIRST_COUNTED <= self._queue.version + 1 <= self._training.steps - _LAST_STEPS

    def _pass_time(self, when: float) -> None:
        if self._is_counted():
            self._counted_s += when - self._now
            self._waited_s += self._waits * (when - self._now)
        super()._pass_time(when)

    # The servers

    def _follow(self, routes: Routes) -> None:
        """Lets as many sessions be in flight as the servers serve, with the weights of now."""
        self._placement.follow(routes)
        self._max_in_flight = self._training.per_server * len(routes.serving)
        self._fill()

    async def _die(self) -> None:
        """Ends a server now and then."""
        rng = random.Random(0)
        while True:
            await asyncio.sleep(self._training.death_s)
            self._pass_time(self._loop.time())
            if not self._cluster.servers:
                continue
            address = rng.choice(sorted(self._cluster.servers))
            server = self._cluster.kill(address)
            self._died += 1
            if calls := self._engines[server.number].in_flight:
                self._placement.failed(address, calls)
            self.lose_engine(server.number)

    # The schedule

    async def _take(self) -> list[Waiting]:
        """Waits for the next batch; meanwhile the pool replaces servers, and lets others in."""
        self._pass_time(self._loop.time())
        self._waits = True
        await self._pool.ensure_healthy()
        while (batch := self._schedule.decide(self._queue.form)) is None:
            of_groups = asyncio.create_task(self._group_ended.wait())
            of_servers = [
                asyncio.create_task(self._pool.wait_for_change()),
                asyncio.create_task(self._pool.wait_until_all_ended()),
            ]
            waits: list[asyncio.Task[Any]] = [of_groups, *of_servers]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self._group_ended.clear()
            if any(task.done() for task in of_servers):
                await self._pool.ensure_healthy()
            for task in waits:
                task.cancel()
        self._pass_time(self._loop.time())
        self._waits = False
        self._fill()
        return batch

    def _fill(self) -> None:
        """Begins sessions while places are free and the schedule has groups to start."""
        while self._in_flight < self._max_in_flight:
            if not self._begun:
                if not self._schedule.decide(self._queue.may_start):
                    return
                number = self._queue.start()
                first = number * GROUP_SIZE
                self._begun = list(self._trace[first : first + GROUP_SIZE])
                self._left[number] = GROUP_SIZE
                self._hold(number)
            session = self._begun.pop(0)
            self._in_flight += 1
            self._waiting.append(session)
            self._start_next()

    def _hold(self, number: int) -> None:
        self._held[number] = sum(
            COMMON_TOKENS + sum(turn.new_tokens + turn.sampled_tokens for turn in session.turns)
            for session in self._begun
        )
        self._held_tokens += self._held[number]
        self._most_held = max(self._most_held, len(self._held))
        self._most_held_tokens = max(self._most_held_tokens, self._held_tokens)

    def _send(self, live: Live) -> None:
        self._turns += self._is_counted()
        super()._send(live)

    def _ask(self, live: Live, request: Request, known: int) -> bool:
        placed = super()._ask(live, request, known)
        if not placed and not self._asks_again:
            self._asks_again = True
            self._loop.call_later(_ASK_AGAIN_S, self._ask_parked)
        return placed

    def _ask_parked(self) -> None:
        """Asks again for the sessions for which the router had no server."""
        self._pass_time(self._loop.time())
        self._asks_again = False
        for parked in [self._parked[index] for index in sorted(self._parked)]:
            self._ask(*parked)

    def _session_ended(self, session: Session) -> None:
        self._in_flight -= 1
        number = session.index // GROUP_SIZE
        self._left[number] -= 1
        if not self._left[number]:
            del self._left[number]
            self._queue.end(number, Group(trajectories=()))
            self._group_ended.set()
        self._fill()
