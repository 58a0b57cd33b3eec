"""The replay: sessions against fake engines in simulated time.

The engine's cost model is the fake engine's (`engines/fake/engine.py`), computed
instead of waited for: a slot for each of at most `max_running` sequences, first come first served;
`prefill_s_per_token` for each prompt token that is not cached and `decode_s_per_token` for each
sampled one, however many run; a prefix cache of `cache_tokens`, least recently used first.
`routing_sim_test.py` holds the two equal. Where the fake forgets whole blocks from the front of a
prefix, this cache forgets tokens from its end, as real engines do.

Invariant: a replay is a function of trace, policy and cost; no wall clock, no other randomness.
"""

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

BLOCK_TOKENS = 16
"""Tokens in a block of the prefix cache, as in `fake_model`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion and what follows it.

    Attributes:
        new_tokens: Prompt tokens that no earlier turn had: the task, or a tool's answer.
        sampled_tokens: Length of the completion.
        tool_s: Seconds from its end to the next turn's request.
    """

    new_tokens: int
    sampled_tokens: int
    tool_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One trajectory of the trace.

    Attributes:
        index: Its place in the trace; sessions start in this order.
        task: Sessions of one task share their first turn's prompt.
        turns: At least one.
    """

    index: int
    task: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an engine costs; see the module."""

    prefill_s_per_token: float
    decode_s_per_token: float
    max_running: int
    cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn on its way to an engine.

    Attributes:
        session: Whose.
        prompt_tokens: Its whole context.
        common_tokens: How many of them every session has, at the front.
        task_tokens: How many of them its task's sessions share, from the front.
    """

    session: Session
    prompt_tokens: int
    common_tokens: int
    task_tokens: int


class Policy(Protocol):
    """Chooses engines. Knows what a router knows: sessions and the calls it sees."""

    def pick(self, request: Request) -> int | None:
        """Returns the engine for a request that is sent now; None: it waits for a slot.

        Waiting sessions are asked again, in the order of the sessions, when a session has ended.
        """
        ...

    def done(self, request: Request) -> None:
        """The request's completion has come."""
        ...

    def finish(self, session: Session) -> None:
        """The session has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay came to.

    Attributes:
        latencies_s: From start to end, per session, in the order in which they ended.
        ends_s: When each ended, ascending.
        hit_rate: Cached prompt tokens over all prompt tokens that an earlier turn had.
        imbalance: Requests at the fullest engine over the mean of all, averaged over the time
            until 90 % of the sessions had ended.
        utilisation: Sequences that run over the slots of all engines, averaged over that time.
        idle: Share of that time in which an engine ran nothing, averaged over the engines.
        num_moves: Turns that went to another engine than the session's turn before.
        hit_tokens: Cached prompt tokens, of all turns but the first.
    """

    latencies_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    hit_rate: float
    hit_tokens: int
    imbalance: float
    num_moves: int
    utilisation: float
    idle: float

    @property
    def wall_s(self) -> float:
        """When the last session ended."""
        return self.ends_s[-1]

    @property
    def to_90_percent_s(self) -> float:
        """When 90 % of the sessions had ended."""
        return self.ends_s[_rank(len(self.ends_s), 0.9)]

    @property
    def mean_latency_s(self) -> float:
        """Over all sessions."""
        return sum(self.latencies_s) / len(self.latencies_s)

    @property
    def p90_latency_s(self) -> float:
        """Over all sessions."""
        return sorted(self.latencies_s)[_rank(len(self.latencies_s), 0.9)]


def _rank(count: int, share: float) -> int:
    return max(0, min(count - 1, round(share * count) - 1))


class PrefixCache:
    """Tokens of prefixes, least recently used first; a parent outlives its children.

    Keys are "" for what all share, ("task", n), ("session", n).
    """

    def __init__(self, capacity: int) -> None:
        self._left = capacity
        self._held: OrderedDict[object, int] = OrderedDict()
        self._pinned: dict[object, int] = {}

    def use(self, parts: Sequence[tuple[object, int]]) -> int:
        """Looks a prompt up, writes the whole of it and pins it; returns the tokens it held.

        Args:
            parts: (key, tokens), from the front of the prompt.
        """
        hit = 0
        whole = True
        for key, tokens in parts:
            held = min(self._held.get(key, 0), tokens) if whole else 0
            hit += held
            whole = held == tokens
        for key, tokens in parts:
            self._pinned[key] = self._pinned.get(key, 0) + 1
            self._grow(key, tokens)
        for key, _ in reversed(parts):
            self._held.move_to_end(key)
        return hit

    def extend(self, key: object, tokens: int) -> None:
        """Writes what has been sampled after a pinned prompt."""
        self._grow(key, tokens)

    def release(self, parts: Sequence[tuple[object, int]]) -> None:
        """Unpins a prompt."""
        for key, _ in parts:
            self._pinned[key] -= 1
            if not self._pinned[key]:
                del self._pinned[key]
        for key, _ in reversed(parts):
            self._held.move_to_end(key)
        self._shrink()

    def _grow(self, key: object, tokens: int) -> None:
        before = self._held.get(key, 0)
        if tokens > before:
            self._held[key] = tokens
            self._left -= tokens - before
            self._shrink()

    def _shrink(self) -> None:
        # Pinned prefixes stay, whatever they hold: an engine that runs them has room for them.
        if self._left >= 0:
            return
        for key in list(self._held):
            if key in self._pinned:
                continue
            given = min(self._held[key], -self._left)
            self._left += given
            self._held[key] -= given
            if not self._held[key]:
                del self._held[key]
            if self._left >= 0:
                return


@dataclass(slots=True)
class Live:
    """A session under way: which turn, its context so far, its engine."""

    session: Session
    started_s: float
    turn: int = 0
    context: int = 0
    engine: int | None = None


@dataclass(slots=True, eq=False)
class Call:
    """A turn under way: its session, its engine, its prompt's parts, whether the engine died."""

    live: Live
    request: Request
    engine: int
    parts: list[tuple[object, int]]
    lost: bool = False


Event: TypeAlias = Live | Call
"""A session sends a turn, or a call is complete."""


@dataclass(slots=True)
class _Engine:
    cost: Cost
    cache: PrefixCache
    running: set[Call] = field(default_factory=set)
    queue: deque[Call] = field(default_factory=deque)

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.queue)


class Simulation:
    """One replay under way.

    Args:
        trace: Sessions, in the order in which they start.
        policy: Chooses engines.
        cost: Of every engine.
        num_engines: At least one.
        max_in_flight: Sessions under way; the next starts when one ends.
        common_tokens: Prompt tokens that all sessions share (system prompt and tools).
    """

    def __init__(
        self,
        trace: Sequence[Session],
        policy: Policy,
        *,
        cost: Cost,
        num_engines: int,
        max_in_flight: int,
        common_tokens: int,
    ) -> None:
        self._policy = policy
        self._cost = cost
        self._engines = [_Engine(cost, PrefixCache(cost.cache_tokens)) for _ in range(num_engines)]
        self._waiting = deque(trace)
        self._max_in_flight = max_in_flight
        self._common_tokens = common_tokens
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Event]] = []
        self._parked: dict[int, tuple[Live, Request, int]] = {}
        self._latencies: list[float] = []
        self._ends: list[float] = []
        self._known_tokens = self._hit_tokens = self._moves = 0
        self._imbalance_area = self._imbalance_s = self._area_s = 0.0
        self._running_area = self._idle_area = 0.0
        self._num_running = self._num_calls = self._fullest = 0
        self._num_idle = num_engines
        # Calls at an engine -> number of engines: the fullest one is known without a search.
        self._engines_with = Counter({0: num_engines})
        self._count_until = _rank(len(trace), 0.9)

    def run(self) -> Replay:
        """Replays the whole trace."""
        for _ in range(self._max_in_flight):
            self._start_next()
        self._play()
        return self._replay()

    def _play(self) -> None:
        while self._events:
            when, _, event = heapq.heappop(self._events)
            self._pass_time(when)
            self._happen(event)

    def _happen(self, event: Event) -> None:
        if isinstance(event, Live):
            self._send(event)
        elif not event.lost:
            self._complete(event)

    def _replay(self) -> Replay:
        return Replay(
            latencies_s=tuple(self._latencies),
            ends_s=tuple(self._ends),
            hit_rate=self._hit_tokens / max(1, self._known_tokens),
            hit_tokens=self._hit_tokens,
            imbalance=self._imbalance_area / max(1e-9, self._imbalance_s),
            num_moves=self._moves,
            utilisation=self._running_area
            / max(1e-9, self._area_s * len(self._engines) * self._cost.max_running),
            idle=self._idle_area / max(1e-9, self._area_s * len(self._engines)),
        )

    def _at(self, when: float, event: Event) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _start_next(self) -> None:
        if self._waiting:
            self._at(self._now, Live(self._waiting.popleft(), self._now))

    def _session_ended(self, session: Session) -> None:
        self._start_next()

    def _is_counted(self) -> bool:
        """Returns whether the present time counts in the means over time."""
        return len(self._ends) <= self._count_until

    def _send(self, live: Live) -> None:
        turn = live.session.turns[live.turn]
        known = live.context
        live.context += turn.new_tokens + (self._common_tokens if live.turn == 0 else 0)
        task_tokens = self._common_tokens + live.session.turns[0].new_tokens
        request = Request(
            session=live.session,
            prompt_tokens=live.context,
            common_tokens=self._common_tokens,
            task_tokens=task_tokens,
        )
        self._ask(live, request, known)

    def _ask(self, live: Live, request: Request, known: int) -> bool:
        number = self._policy.pick(request)
        if number is None:
            if live.session.index not in self._parked:
                self._parked[live.session.index] = (live, request, known)
            return False
        self._parked.pop(live.session.index, None)
        task_tokens = request.task_tokens
        self._moves += live.engine is not None and live.engine != number
        live.engine = number
        self._known_tokens += known
        parts: list[tuple[object, int]] = [
            ("", self._common_tokens),
            (("task", live.session.task), task_tokens - self._common_tokens),
        ]
        if live.context > task_tokens:
            parts.append((("session", live.session.index), live.context - task_tokens))
        call = Call(live, request, number, parts)
        engine = self._engines[number]
        self._count_call(engine, 1)
        if len(engine.running) < self._cost.max_running:
            self._begin(call)
        else:
            engine.queue.append(call)
        return True

    def _count_call(self, engine: _Engine, by: int) -> None:
        """Counts a call that comes to an engine, or leaves it; before the engine does."""
        before = engine.in_flight
        self._num_calls += by
        self._engines_with[before] -= 1
        self._engines_with[before + by] += 1
        if before + by > self._fullest or (
            before == self._fullest and not self._engines_with[before]
        ):
            self._fullest = before + by

    def _begin(self, call: Call) -> None:
        engine = self._engines[call.engine]
        self._num_running += 1
        self._num_idle -= not engine.running
        engine.running.add(call)
        hit = engine.cache.use(call.parts)
        if call.live.turn:
            self._hit_tokens += hit
        turn = call.live.session.turns[call.live.turn]
        # Whole blocks, and never all of the prompt: the last token's logits are sampled from.
        cached = min(hit, call.request.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        uncached = call.request.prompt_tokens - cached
        self._at(
            self._now
            + uncached * self._cost.prefill_s_per_token
            + turn.sampled_tokens * self._cost.decode_s_per_token,
            call,
        )

    def lose_engine(self, number: int) -> None:
        """Replaces an engine by a new one, with an empty cache; its calls are sent again."""
        engine = self._engines[number]
        lost = sorted((*engine.running, *engine.queue), key=lambda call: call.live.session.index)
        self._num_running -= len(engine.running)
        self._num_idle += bool(engine.running)
        for call in lost:
            call.lost = True
            self._policy.done(call.request)
            self._count_call(engine, -1)
            if not engine.queue:
                engine.running.pop()
            else:
                engine.queue.pop()
        self._engines[number] = _Engine(self._cost, PrefixCache(self._cost.cache_tokens))
        for call in lost:
            self._ask(call.live, call.request, 0)  # what it knows is counted already

    def _complete(self, call: Call) -> None:
        live, engine = call.live, self._engines[call.engine]
        turn = live.session.turns[live.turn]
        live.context += turn.sampled_tokens
        own = ("session", live.session.index)
        if len(call.parts) == 2:
            engine.cache.use([(own, turn.sampled_tokens)])
            engine.cache.release([(own, turn.sampled_tokens)])
        else:
            engine.cache.extend(own, call.parts[2][1] + turn.sampled_tokens)
        engine.cache.release(call.parts)
        self._count_call(engine, -1)
        engine.running.remove(call)
        self._num_running -= 1
        self._num_idle += not engine.running
        self._policy.done(call.request)
        if engine.queue:
            self._begin(engine.queue.popleft())
        live.turn += 1
        if live.turn < len(live.session.turns):
            self._at(self._now + turn.tool_s, live)
            return
        self._policy.finish(live.session)
        self._latencies.append(self._now - live.started_s)
        self._ends.append(self._now)
        self._session_ended(live.session)
        for index in sorted(self._parked):
            self._ask(*self._parked[index])

    def _pass_time(self, when: float) -> None:
        elapsed = when - self._now
        if elapsed > 0 and self._is_counted():
            self._area_s += elapsed
            self._running_area += elapsed * self._num_running
            self._idle_area += elapsed * self._num_idle
            if self._num_calls:
                share = self._num_calls / len(self._engines)
                self._imbalance_area += elapsed * self._fullest / share
                self._imbalance_s += elapsed
        self._now = when
