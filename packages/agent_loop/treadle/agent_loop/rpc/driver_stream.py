"""The stream between a driver and a program that it started: messages in both directions.

Invariants:

1. `send` never blocks. What waits there is bounded by the protocol: a sender of more than the other
   end requested, as lines of a log, looks at `num_unsent` first.
2. Messages arrive in the order in which they were sent, on the event loop, until `on_end` is
   called, once.
3. The program sends a sign of life whenever nothing else was for `beat_s`, from a thread. So only a
   process that was stopped, or whose machine stands still, is silent, and one whose event loop a
   user's code holds is not. gRPC itself sends no pings: who is silent for how long is for the
   driver to decide, and a driver that was stopped finds its programs when it continues.
4. Of many messages in a short time, several travel at a time: a message of gRPC costs more
   processor time than most of ours. One that comes alone is sent at once.

Who waits: the two threads of the program's end for the driver to read and to write; a task of the
driver's end for the program. All end with the stream.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from treadle.agent_loop.rpc.driven import DrivenAccess

__all__ = ["DriverEnd", "ProgramEnd"]

_log = logging.getLogger(__name__)
_PAUSE_S = 0.02
"""Minimum time between two messages of gRPC, unless more waits than fits into one."""
_MAX_TOGETHER = 8
"""Of messages with images: a message of gRPC has at most 2 GiB."""


class ProgramEnd:
    """The program's end; made on the event loop that `on_message` is called on.

    Args:
        split: Returns the messages that came at a time.
        join: Returns what is sent of messages at a time.
        on_end: Called when the driver is gone, or has ended the stream.
        beat: Returns a sign of life; called in a thread.
        beat_s: Seconds between signs of life.
    """

    def __init__(
        self,
        *,
        split: Callable[[Any], Iterable[Any]],
        join: Callable[[Sequence[Any]], object],
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
        beat: Callable[[], object],
        beat_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._split, self._join = split, join
        self._on_message, self._on_end = on_message, on_end
        self._beat, self._beat_s = beat, beat_s
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()

    def serve(self, requests: Iterable[Any], context: object) -> Iterator[object]:
        """Is the method of the servicer: yields what is sent, until `close`."""
        threading.Thread(target=self._read, args=(requests,), name="read", daemon=True).start()
        yield self._join([self._beat()])
        while True:
            try:
                messages = [self._outgoing.get(timeout=self._beat_s)]
            except queue.Empty:
                messages = [self._beat()]
            with suppress(queue.Empty):
                while len(messages) < _MAX_TOGETHER and messages[-1] is not None:
                    messages.append(self._outgoing.get_nowait())
            ended = messages[-1] is None
            yield self._join(messages[:-1] if ended else messages)
            if ended:
                return
            if len(messages) < _MAX_TOGETHER:
                time.sleep(_PAUSE_S)  # in a thread

    def send(self, message: object) -> None:
        """Sends a message; nothing happens if the driver is gone."""
        self._outgoing.put(message)

    @property
    def num_unsent(self) -> int:
        """Number of messages that wait for the driver to read."""
        return self._outgoing.qsize()

    def close(self) -> None:
        """Ends the stream after what was sent."""
        self._outgoing.put(None)

    def _read(self, requests: Iterable[Any]) -> None:
        with suppress(RuntimeError):  # the event loop has closed
            try:
                with suppress(grpc.RpcError):  # the driver is gone
                    for request in requests:
                        for message in self._split(request):
                            self._loop.call_soon_threadsafe(self._on_message, message)
            finally:
                self._outgoing.put(None)
                self._loop.call_soon_threadsafe(self._on_end)


class DriverEnd:
    """The driver's end; made on the event loop that `on_message` is called on.

    Args:
        method: Returns the method of the stub of a channel.
        split: Returns the messages that came at a time.
        join: Returns what is sent of messages at a time.
        on_end: Called when the program is gone, the stream was closed, or a message cannot be read;
            with what is wrong, None where the stream just ended.
    """

    def __init__(
        self,
        access: DrivenAccess,
        address: str,
        method: Callable[[grpc.aio.Channel], Callable[..., AsyncIterator[Any]]],
        *,
        split: Callable[[Any], Iterable[Any]],
        join: Callable[[Sequence[Any]], object],
        on_message: Callable[[Any], None],
        on_end: Callable[[str | None], None],
    ) -> None:
        self._security = access.channels()
        self._address, self._method = address, method
        self._split, self._join = split, join
        self._on_message, self._on_end = on_message, on_end
        self._outgoing: asyncio.Queue[object] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(), name=f"stream to {address}")

    def send(self, message: object) -> None:
        """Sends a message; nothing happens if the program is gone."""
        self._outgoing.put_nowait(message)

    async def aclose(self) -> None:
        """Ends the stream."""
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        problem = None
        try:
            async with self._security.open(self._address) as channel:
                call = self._method(channel)
                async for response in call(self._sent(), metadata=self._security.metadata):
                    for message in self._split(response):
                        self._on_message(message)
        except grpc.aio.AioRpcError as error:
            problem = f"ended its connection: {error.code().name}: {error.details()}"
        except Exception as error:  # a bug, here or there, which must not stop the others
            _log.exception("a message of %s cannot be read", self._address)
            problem = f"sent what cannot be read here: {type(error).__name__}: {error}"
        finally:
            self._on_end(problem)

    async def _sent(self) -> AsyncIterator[object]:
        while True:
            messages = [await self._outgoing.get()]
            while len(messages) < _MAX_TOGETHER and not self._outgoing.empty():
                messages.append(self._outgoing.get_nowait())
            yield self._join(messages)
            if len(messages) < _MAX_TOGETHER:
                await asyncio.sleep(_PAUSE_S)
