"""Batched opening of sessions: the requests made while a call is in flight share the next one.

Invariant: at most one call is in flight. So a single request is sent at once, and under load one
call opens many sessions, which divides the cost of a call among them.

The caller waits in `ask`. `run`, a task of the channel's owner, makes the calls.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from treadle.rollout.v1 import routing_service_pb2 as pb

_MAX_SESSIONS = 256
"""Maximum number in a call, far below what a router takes."""

_Asked = tuple[pb.OpenSessionRequest, "asyncio.Future[pb.OpenSessionResponse | None]"]


class OpenTogether:
    """Asks a router for the replicas of sessions."""

    def __init__(
        self, call: Callable[[pb.OpenSessionsRequest], Awaitable[pb.OpenSessionsResponse]]
    ) -> None:
        self._call = call
        self._asked: list[_Asked] = []
        self._any = asyncio.Event()
        self._offered = True

    async def ask(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse | None:
        """Returns the router's answer; None if the session needs a call of OpenSession.

        Raises:
            grpc.aio.AioRpcError: The call failed.
        """
        if not self._offered:
            return None
        answer: asyncio.Future[pb.OpenSessionResponse | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._asked.append((request, answer))
        self._any.set()
        return await answer

    async def run(self) -> None:
        """Makes the calls, until it is cancelled; who waits then is cancelled too."""
        try:
            while True:
                await self._any.wait()
                self._any.clear()
                while asked := [each for each in self._asked if not each[1].done()]:
                    self._asked = asked[_MAX_SESSIONS:]
                    await self._open(asked[:_MAX_SESSIONS])
        finally:
            for _, answer in self._asked:
                answer.cancel()

    async def _open(self, asked: list[_Asked]) -> None:
        try:
            response = await self._call(pb.OpenSessionsRequest(sessions=[r for r, _ in asked]))
        except grpc.aio.AioRpcError as failed:
            if failed.code() is grpc.StatusCode.UNIMPLEMENTED:  # a router that predates the method
                self._offered = False
                _settle(asked, [None] * len(asked))
                return
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(failed)
        except BaseException:
            for _, answer in asked:
                answer.cancel()
            raise
        else:
            _settle(asked, [each if each.address else None for each in response.answers])


def _settle(asked: list[_Asked], answers: Sequence[pb.OpenSessionResponse | None]) -> None:
    for (_, waiting), answer in zip(asked, answers, strict=True):
        if not waiting.done():
            waiting.set_result(answer)
