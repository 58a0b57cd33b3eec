"""An answer that is sent while it is sampled.

Invariant: nothing is sent before the first token, so that a request that fails at once has the
status of its error. From then on the answer is a stream: a failure ends it with an error event.
When the client goes away, or the session is closed, the completion is cancelled; it leaves no
trace. The stream owns the task of its completion, and the slots of its request until it ends.

The stream waits for tokens and for the client; a slow client does not slow the completion, whose
text waits here.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from treadle.agent_loop.capture import CapturedTurn, TurnDelta
from treadle.agent_loop.proxy.apis.common import AnswerWriter
from treadle.agent_loop.proxy.errors import ApiError

Turns = tuple[CapturedTurn, ...]


class EventStream(Response):
    """The events of one answer.

    Args:
        complete: Samples the answer, given what takes its deltas; returns None if nobody waits for
            it any more.
        while_open: Runs the sending, and cancels it if the session is closed.
        slots: Left when the stream has ended.
        finished: Called with the turns, when they are recorded.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        writer: AnswerWriter,
        complete: Callable[[Callable[[int, TurnDelta], None]], Coroutine[Any, Any, Turns | None]],
        *,
        while_open: Callable[[Coroutine[Any, Any, bool]], Coroutine[Any, Any, bool]],
        slots: ExitStack,
        finished: Callable[[Turns], None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._writer = writer
        self._while_open = while_open
        self._slots = slots
        self._finished = finished
        self._deltas: list[tuple[int, TurnDelta]] = []
        self._more = asyncio.Event()
        self._sampling = asyncio.create_task(complete(self._take))
        self._sampling.add_done_callback(lambda _: self._more.set())

    async def begun(self) -> bool:
        """Waits for the first token; returns whether there will be an answer.

        Raises:
            ApiError: The completion failed before.
        """
        try:
            await self._more.wait()
            if self._sampling.done() and self._sampling.result() is None and not self._deltas:
                await self._end()
                return False
        except BaseException:
            await self._end()
            raise
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream; as starlette calls a response."""
        try:
            await self._while_open(self._send(send))
        except ApiError:  # The session was closed; its agent has ended.
            pass
        finally:
            await self._end()

    async def _send(self, send: Send) -> bool:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await self._write(send, self._writer.begin())
        while True:
            await self._more.wait()
            self._more.clear()
            ended = self._sampling.done()
            deltas, self._deltas = self._deltas, []
            for index, delta in deltas:
                await self._write(send, self._writer.delta(index, delta))
            if ended:
                break
        try:
            turns = self._sampling.result()
        except ApiError as error:
            await self._write(send, self._writer.failed(error))
        else:
            if turns is not None:
                self._finished(turns)
                await self._write(send, self._writer.end(turns))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _write(self, send: Send, events: Iterator[bytes]) -> None:
        if body := b"".join(events):
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self) -> None:
        self._sampling.cancel()
        await asyncio.wait([self._sampling])
        self._slots.close()

    def _take(self, index: int, delta: TurnDelta) -> None:
        self._deltas.append((index, delta))
        self._more.set()
