"""The routing rules that are compared, each as its project published it.

* `CumulativeHeap`: verl of 2025-08, `AsyncLLMServerManager`. Each of 8 agent-loop workers has its
  own heap of (sessions ever given, a number), over servers in an order of its own; a new session
  goes to the top; a known one stays where it was.
* `GlobalInFlight`: verl of 2026-08, `GlobalRequestLoadBalancer`. One counter of requests in flight
  per server; a new session goes to the first least loaded; a known one stays.
* `ConsistentHash`: a ring with 100 points per server; the session's hash chooses.
* `CacheAware`: SGLang's router with its defaults (cache_threshold 0.3, balance_abs_threshold 64,
  balance_rel_threshold 1.5): the server that has seen the longest prefix of the prompt, if that
  is more than 0.3 of it, else the one that holds the least; while the loads differ by more than
  both thresholds, the least loaded.
"""

import bisect
import hashlib
import heapq
import random
from collections import Counter

from routing_sim import Request, Session

NUM_WORKERS = 8


class CumulativeHeap:
    """verl's older rule."""

    def __init__(self, num_engines: int, seed: int) -> None:
        rng = random.Random(seed)
        self._heaps = []
        for _ in range(NUM_WORKERS):
            order = list(range(num_engines))
            rng.shuffle(order)
            keys = [rng.random() for _ in order]  # hash(server): arbitrary, fixed per worker
            heap = [(0, key, engine) for key, engine in zip(keys, order, strict=True)]
            heapq.heapify(heap)
            self._heaps.append(heap)
        self._pins: dict[int, int] = {}

    def pick(self, request: Request) -> int:
        """Where it was, else the top of its worker's heap."""
        session = request.session.index
        if session not in self._pins:
            heap = self._heaps[session % NUM_WORKERS]
            count, key, engine = heap[0]
            heapq.heapreplace(heap, (count + 1, key, engine))
            self._pins[session] = engine
        return self._pins[session]

    def done(self, request: Request) -> None:
        """Counts never decrease."""

    def finish(self, session: Session) -> None:
        """Forgets the session."""
        del self._pins[session.index]


class GlobalInFlight:
    """verl's newer rule."""

    def __init__(self, num_engines: int) -> None:
        self._loads = [0] * num_engines
        self._pins: dict[int, int] = {}

    def pick(self, request: Request) -> int:
        """Where it was, else the first of the least loaded."""
        engine = self._pins.setdefault(
            request.session.index, min(range(len(self._loads)), key=self._loads.__getitem__)
        )
        self._loads[engine] += 1
        return engine

    def done(self, request: Request) -> None:
        """One request less in flight."""
        self._loads[self._pins[request.session.index]] -= 1

    def finish(self, session: Session) -> None:
        """Forgets the session."""
        del self._pins[session.index]


class ConsistentHash:
    """A ring."""

    def __init__(self, num_engines: int, *, points: int = 100) -> None:
        self._ring = sorted(
            (_hash(f"engine {engine} point {point}"), engine)
            for engine in range(num_engines)
            for point in range(points)
        )

    def pick(self, request: Request) -> int:
        """The next point of the ring."""
        place = bisect.bisect(self._ring, (_hash(f"session {request.session.index}"), 0))
        return self._ring[place % len(self._ring)][1]

    def done(self, request: Request) -> None:
        """Looks at no load."""

    def finish(self, session: Session) -> None:
        """Keeps nothing."""


class CacheAware:
    """SGLang's rule.

    The router's tree of prompts is what it has sent where, never forgotten (its default bound of
    2**26 entries is far).
    """

    def __init__(self, num_engines: int) -> None:
        self._loads = [0] * num_engines
        self._sizes = [0] * num_engines
        self._seen: list[Counter[object]] = [Counter() for _ in range(num_engines)]
        self._at: dict[int, int] = {}

    def pick(self, request: Request) -> int:
        """The longest match, or balance."""
        engines = range(len(self._loads))
        most, least = max(self._loads), min(self._loads)
        if most - least > 64 and most > 1.5 * least:
            engine = min(engines, key=self._loads.__getitem__)
        else:
            matches = [self._match(number, request) for number in engines]
            engine = max(engines, key=matches.__getitem__)
            if matches[engine] <= 0.3 * request.prompt_tokens:
                engine = min(engines, key=self._sizes.__getitem__)
        for key, tokens in _parts(request):
            self._sizes[engine] += max(0, tokens - self._seen[engine][key])
            self._seen[engine][key] = max(tokens, self._seen[engine][key])
        self._loads[engine] += 1
        self._at[request.session.index] = engine
        return engine

    def _match(self, engine: int, request: Request) -> int:
        seen, match = self._seen[engine], 0
        for key, tokens in _parts(request):
            match += min(seen[key], tokens)
            if seen[key] < tokens:
                break
        return match

    def done(self, request: Request) -> None:
        """One request less in flight."""
        self._loads[self._at[request.session.index]] -= 1

    def finish(self, session: Session) -> None:
        """Its tree keeps what it has."""
        del self._at[session.index]


def _parts(request: Request) -> list[tuple[object, int]]:
    return [
        ("", request.common_tokens),
        (("task", request.session.task), request.task_tokens - request.common_tokens),
        (("session", request.session.index), request.prompt_tokens - request.task_tokens),
    ]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
