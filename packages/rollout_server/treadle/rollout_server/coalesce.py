"""The coalescer: single tokens in, messages worth sending out.

Invariant: the ids, log-probs and versions that come out are those that came in, in order;
a `Tokens` never mixes weight versions; tokens wait at most `max_wait_s`, and never behind
`max_tokens` others. Python grpc.aio sends about ten thousand messages a second whatever
their size, so one token each would be the bottleneck.

Who waits: the reader, for a batch. Who wakes it: the pump, a task that reads the engine
and is owned by ``async with``; or the timer of the oldest waiting token. A slow reader
does not slow the engine: what waits for it is at most one completion.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self

from treadle.rollout_server.clock import Clock, Timer
from treadle.rollout_server.engine import EngineEvent, Tokens


class Coalescer:
    """Iterate it inside ``async with``.

    Args:
        events: The engine's; closed at exit, which aborts the sequence.
        max_tokens: Send when so many tokens wait.
        max_wait_s: Send when the oldest waits so long.
        clock: Times the wait.
    """

    def __init__(
        self,
        events: AsyncGenerator[EngineEvent, None],
        *,
        max_tokens: int,
        max_wait_s: float,
        clock: Clock,
    ) -> None:
        self._events = events
        self._max_tokens = max_tokens
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._ready: deque[EngineEvent] = deque()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._version = 0
        self._timer: Timer | None = None
        self._wake = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Starts the pump."""
        self._pump = asyncio.create_task(self._read())
        self._pump.add_done_callback(lambda _: self._wake.set())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the pump, and with it the sequence."""
        self._pump.cancel()
        await asyncio.wait({self._pump})
        if not self._pump.cancelled():
            self._pump.exception()  # Seen: the reader has left, and its own error counts.
        self._stop_timer()

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    async def __anext__(self) -> EngineEvent:
        """The next event; what the engine raised once all before it is out."""
        while not self._ready:
            if self._pump.done():
                self._pump.result()
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._ready.popleft()

    async def _read(self) -> None:
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    if isinstance(event, Tokens):
                        self._add(event)
                    else:
                        self._flush()
                        self._put(event)
        finally:
            self._flush()

    def _add(self, tokens: Tokens) -> None:
        if self._ids and tokens.weight_version != self._version:
            self._flush()
        if not self._ids:
            self._version = tokens.weight_version
            self._timer = self._clock.call_at(self._clock.time() + self._max_wait_s, self._flush)
        self._ids.extend(tokens.token_ids)
        self._logprobs.extend(tokens.logprobs)
        if len(self._ids) >= self._max_tokens:
            self._flush()

    def _flush(self) -> None:
        self._stop_timer()
        if self._ids:
            self._put(Tokens(tuple(self._ids), tuple(self._logprobs), self._version))
            self._ids.clear()
            self._logprobs.clear()

    def _put(self, event: EngineEvent) -> None:
        self._ready.append(event)
        self._wake.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
