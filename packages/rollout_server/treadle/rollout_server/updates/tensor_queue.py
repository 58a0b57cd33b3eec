"""The tensor queue: tensors on their way into an engine that loads in place.

Invariant: the engine gets every tensor once, in the order of the puts. Its bytes return to the
stream that put it when the engine requests the next one.

Who waits: the engine, in `tensors`, for a tensor or the end; a stream, in `room`, until no tensor
waits for the engine. A stream that waits for room before each of its tensors has at most one
waiting here, so an engine that falls behind stops the streams, and with them their senders. Who
wakes them: `put` and `finish` the engine, the engine the streams, `close` all of them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from treadle.rollout_server.engine import NamedTensor
from treadle.rollout_server.errors import RolloutServerError


@dataclass(frozen=True, slots=True)
class _Entry:
    tensor: NamedTensor
    owner: object
    done: Callable[[], None] | None


class TensorQueue:
    """See the module docstring."""

    def __init__(self) -> None:
        self._waiting: deque[_Entry] = deque()
        self._finished = False
        self._error: RolloutServerError | None = None
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(
        self, tensor: NamedTensor, *, owner: object = None, done: Callable[[], None] | None = None
    ) -> None:
        """Queues a tensor.

        Args:
            tensor: A whole one, or a part.
            owner: Object that keeps the tensor's memory valid; held until the engine needs the
                bytes no more.
        """
        self._waiting.append(_Entry(tensor, owner, done))
        self._room.clear()
        self._idle.clear()
        self._changed.set()

    async def room(self) -> None:
        """Returns when the engine has taken every tensor.

        Raises:
            RolloutServerError: The error given to `close`.
        """
        await self._room.wait()
        if self._error is not None:
            raise self._error

    async def caught_up(self) -> None:
        """Returns when the engine needs the bytes of no tensor that was put.

        Raises:
            RolloutServerError: The error given to `close`.
        """
        await self._idle.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Tells the engine that every tensor was put."""
        self._finished = True
        self._changed.set()

    def close(self, error: RolloutServerError) -> None:
        """Drops the waiting tensors; the engine and all streams get the error."""
        self._error = error
        self._waiting.clear()
        self._changed.set()
        self._room.set()
        self._idle.set()

    async def tensors(self) -> AsyncIterator[NamedTensor]:
        """Yields what `Engine.load_weights` iterates.

        Raises:
            RolloutServerError: The error given to `close`.
        """
        while True:
            while not self._waiting:
                if self._error is not None:
                    raise self._error
                if self._finished:
                    return
                self._changed.clear()
                await self._changed.wait()
            entry = self._waiting.popleft()
            if not self._waiting:
                self._room.set()
            yield entry.tensor
            if entry.done is not None:
                entry.done()
            if not self._waiting:
                self._idle.set()
