"""The tensor queue: whole tensors on their way into an engine that loads in place.

Invariant: every tensor put is given to the engine once, in the order of the puts. Its bytes
are its giver's again when `done` is called, which is when the engine asks for the next one.

Who waits: the engine, in `tensors`, for a tensor or the end; a giver, in `room`, until no
tensor waits for the engine. Whoever asks for room before each of its tensors has at most one
waiting here, so an engine that falls behind stops the givers, and with them their senders.
Who wakes them: `put` and `finish` the engine, the engine the givers, `close` all of them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from treadle.rollout_server.engine import NamedTensor
from treadle.rollout_server.errors import RolloutServerError


class TensorQueue:
    """See the module docstring."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[NamedTensor, Callable[[], None]]] = deque()
        self._finished = False
        self._error: RolloutServerError | None = None
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, tensor: NamedTensor, done: Callable[[], None]) -> None:
        """Gives a whole tensor; `done` is called when the engine needs its bytes no more."""
        self._waiting.append((tensor, done))
        self._room.clear()
        self._idle.clear()
        self._changed.set()

    async def room(self) -> None:
        """Returns when the engine has taken every tensor.

        Raises:
            RolloutServerError: What `close` was given.
        """
        await self._room.wait()
        if self._error is not None:
            raise self._error

    async def caught_up(self) -> None:
        """Returns when the engine needs the bytes of no tensor that was put.

        Raises:
            RolloutServerError: What `close` was given.
        """
        await self._idle.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Says that every tensor was put."""
        self._finished = True
        self._changed.set()

    def close(self, error: RolloutServerError) -> None:
        """Says that the rest will not come; the engine and all givers get the error."""
        self._error = error
        self._waiting.clear()
        self._changed.set()
        self._room.set()
        self._idle.set()

    async def tensors(self) -> AsyncIterator[NamedTensor]:
        """What `Engine.load_weights` iterates.

        Raises:
            RolloutServerError: What `close` was given.
        """
        while True:
            while not self._waiting:
                if self._error is not None:
                    raise self._error
                if self._finished:
                    return
                self._changed.clear()
                await self._changed.wait()
            tensor, done = self._waiting.popleft()
            if not self._waiting:
                self._room.set()
            yield tensor
            done()
            if not self._waiting:
                self._idle.set()
