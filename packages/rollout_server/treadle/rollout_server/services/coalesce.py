"""The coalescer: groups single tokens into messages.

Invariant: the ids, log-probs, versions, experts and sampling masks that are sent or left for `rest`
are those that were added, in order. A `Tokens` never mixes weight versions. The first tokens of a
completion do not wait; later ones wait at most `max_wait_s`, and never behind `max_tokens` others.

Python grpc.aio sends about ten thousand messages a second whatever their size, so a message per
token would be the bottleneck. Events that are ready together are sent together, at most `MAX_READY`
of them, so that no message exceeds gRPC's limit (4 MiB) after a reader stalled.

Who waits: `rest`, and a block that ends with an error, for the send in progress. Who wakes whom:
`add` and the timer of the oldest waiting token start a send, a separate task, as soon as the caller
of `add` waits for the engine. Events that are added before that leave in the same message, and a
completion that never waits has no send at all: everything is in `rest`. A slow reader does not
slow the engine: at most one completion waits for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from treadle.rollout_server.clock import Clock, TimerHandle
from treadle.rollout_server.engine import EngineEvent, Finished, Tokens

MAX_READY = 256
"""Maximum number of events sent together.

A token takes 9 bytes, and `coalesce.max_tokens` is at most 1024. Reports (routed experts, sampling
masks, log-probs of a prompt) come on top, and `services/generation.py` splits those.
"""


class Coalescer:
    """Takes the events of one completion, inside ``async with``.

    Leaving it with an error waits until everything before the error has been sent: those tokens
    are good, and gRPC takes no status while a message is on its way. Cancellation ends the send.

    Args:
        send: Sends events that are ready together, at least one; called once at a time.
        max_tokens: Number of waiting tokens that starts a send.
        max_wait_s: Maximum time that a token waits.
    """

    def __init__(
        self,
        send: Callable[[Sequence[EngineEvent]], Awaitable[None]],
        *,
        max_tokens: int,
        max_wait_s: float,
        clock: Clock,
    ) -> None:
        self._send = send
        self._max_tokens = max_tokens
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._ready: list[EngineEvent] = []
        self._rest: list[EngineEvent] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._routed: list[bytes] = []
        self._masks: list[bytes] = []
        self._version = 0
        self._first = True
        self._timer: TimerHandle | None = None
        self._start: asyncio.Handle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        """Returns itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Sends what came before an error; ends the send when cancelled."""
        try:
            if isinstance(error, Exception):
                self._flush()
                await self._sent()
        finally:
            self._stop_timer()
            self._stop_start()
            if self._sending is not None and not self._sending.done():
                self._sending.cancel()
                await asyncio.wait({self._sending})

    def add(self, event: EngineEvent) -> None:
        """Takes the next event.

        Raises:
            Exception: The error that `send` raised before.
        """
        assert not self._rest, "the engine went on after Finished"
        if self._error is not None:
            raise self._error
        if isinstance(event, Tokens):
            self._add(event)
            return
        self._flush()
        if isinstance(event, Finished):
            self._stop_start()
            self._rest = [*self._ready, event]
            self._ready = []
        else:
            self._put(event)

    async def rest(self) -> Sequence[EngineEvent]:
        """Returns the events that are not sent yet, `Finished` last, once all others are sent.

        Raises:
            Exception: The error that `send` raised.
        """
        assert self._rest, "the engine ended without Finished"
        await self._sent()
        if self._error is not None:
            raise self._error
        rest = self._rest
        while len(rest) > MAX_READY:
            await self._send(rest[:MAX_READY])
            rest = rest[MAX_READY:]
        return rest

    def _add(self, tokens: Tokens) -> None:
        if not self._ids and (self._first or len(tokens.token_ids) >= self._max_tokens):
            self._first = False
            self._put(tokens)  # Not copied: it would be flushed at once.
            return
        if self._ids and tokens.weight_version != self._version:
            self._flush()
        if not self._ids:
            self._version = tokens.weight_version
            self._timer = self._clock.call_at(self._clock.time() + self._max_wait_s, self._flush)
        self._ids.extend(tokens.token_ids)
        self._logprobs.extend(tokens.logprobs)
        if tokens.routed_experts:
            self._routed.append(tokens.routed_experts)
        self._masks.extend(tokens.sampling_masks)
        if len(self._ids) >= self._max_tokens:
            self._flush()

    def _flush(self) -> None:
        self._stop_timer()
        if self._ids:
            routed = b"".join(self._routed)
            logprobs, masks = tuple(self._logprobs), tuple(self._masks)
            self._put(Tokens(tuple(self._ids), logprobs, self._version, routed, masks))
            self._ids.clear()
            self._logprobs.clear()
            self._routed.clear()
            self._masks.clear()

    def _put(self, event: EngineEvent) -> None:
        self._ready.append(event)
        idle = self._start is None and (self._sending is None or self._sending.done())
        if idle and self._error is None:
            self._start = asyncio.get_running_loop().call_soon(self._start_sending)

    def _start_sending(self) -> None:
        self._start = None
        self._sending = asyncio.create_task(self._send_ready())

    async def _sent(self) -> None:
        """Waits until the ready events are sent, or cannot be."""
        if self._start is not None:
            self._stop_start()
            self._start_sending()
        if self._sending is not None:
            await self._sending

    async def _send_ready(self) -> None:
        try:
            while self._ready:
                ready, self._ready = self._ready[:MAX_READY], self._ready[MAX_READY:]
                await self._send(ready)
        except Exception as error:
            self._error = error

    def _stop_start(self) -> None:
        if self._start is not None:
            self._start.cancel()
            self._start = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
