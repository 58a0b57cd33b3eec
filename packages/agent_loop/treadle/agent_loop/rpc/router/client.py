"""The client of the routing service: a worker's view of the replicas that many workers share.

Invariants:

1. An answer is used for the validity time that the router gave. Then a new request is sent, which
   contains the last answer, so that a restarted router learns where the session is.
2. While the router is unreachable, a session with an answer continues with it, without waiting. A
   new session waits for the router, until its deadline.
3. Finished sessions are reported to the router in the background, in a few attempts at most. If
   all of them fail, the router's lease frees the slot. Reports are batched, and wait at most a
   twentieth of the validity time.
4. Sessions that need not wait for room are opened together; one that must wait has its own call.

The caller waits in `open` for the router's answer, bounded by `wait_s`; `finish` never waits. The
two tasks here, which open sessions and report finished ones, are owned by `connect`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, cast

import grpc.aio

from treadle.agent_loop.clock import Clock
from treadle.agent_loop.errors import (
    GenerationTimeoutError,
    OverloadedError,
    ReplicaUnavailableError,
    SetupError,
)
from treadle.agent_loop.rpc.errors import Action, RpcFailure, classify
from treadle.agent_loop.rpc.replica_client import Metadata, RpcDeadlines
from treadle.agent_loop.rpc.retry import Backoff, RetryPolicy
from treadle.agent_loop.rpc.router.open_together import OpenTogether
from treadle.agent_loop.rpc.security import ChannelSecurity
from treadle.rollout.v1 import routing_service_pb2 as pb
from treadle.rollout.v1 import routing_service_pb2_grpc as pb_grpc
from treadle.tracing import inject, span

_log = logging.getLogger(__name__)
_MAX_UNSENT = 10_000
_CLOSE_S = 2.0
_SHARE_OF_VALIDITY = 0.05
_MAX_FINISHED = 256
"""Sessions that one call finishes."""


class _RoutingStub(Protocol):
    """The types of the generated stub, which has none."""

    def OpenSession(
        self, request: pb.OpenSessionRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[pb.OpenSessionResponse]: ...

    def FinishSession(
        self, request: pb.FinishSessionRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[pb.FinishSessionResponse]: ...

    def OpenSessions(
        self, request: pb.OpenSessionsRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[pb.OpenSessionsResponse]: ...

    def FinishSessions(
        self, request: pb.FinishSessionsRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[pb.FinishSessionsResponse]: ...

    def ListReplicas(
        self, request: pb.ListReplicasRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[pb.ListReplicasResponse]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    address: str
    valid_until: float


class RemoteRouter:
    """The routing service as a `Placement`. Made by `connect`."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        *,
        metadata: Metadata,
        deadlines: RpcDeadlines,
        retry: RetryPolicy,
        clock: Clock,
    ) -> None:
        self._address = address
        self._stub: _RoutingStub = cast(Any, pb_grpc).RoutingServiceStub(channel)
        self._metadata = metadata
        self._deadlines = deadlines
        self._retry = retry
        self._clock = clock
        self._backoff = Backoff()
        self._answers: dict[str, _Answer | None] = {}
        self._unsent: dict[str, None] = {}
        self._any_unsent = asyncio.Event()
        self._finishes_many = True
        self._valid_for_s = 0.0
        self._together = OpenTogether(
            lambda request: self._stub.OpenSessions(
                request, timeout=deadlines.server_info_s, metadata=metadata
            )
        )

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        address: str,
        *,
        security: ChannelSecurity,
        deadlines: RpcDeadlines,
        retry: RetryPolicy,
        clock: Clock,
    ) -> AsyncIterator["RemoteRouter"]:
        """Opens the channel without a call. Reports the last finished sessions when it closes.

        Raises:
            SetupError: A token would travel in plain text.
        """
        async with security.open(address) as channel:
            router = cls(
                address,
                channel,
                metadata=security.metadata,
                deadlines=deadlines,
                retry=retry,
                clock=clock,
            )
            tasks = [
                asyncio.create_task(router._send_as_they_come(), name="report finished sessions"),
                asyncio.create_task(router._together.run(), name="open sessions"),
            ]
            try:
                yield router
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_S):
                        await router._send_all()

    async def replicas(self) -> list[str]:
        """Returns the addresses of all replicas, waiting for a router that is still starting.

        Raises:
            SetupError: The router does not answer within `connect_s`, or refuses.
        """
        give_up_at = self._clock.now() + self._deadlines.connect_s
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = await self._stub.ListReplicas(
                    pb.ListReplicasRequest(),
                    timeout=self._deadlines.server_info_s,
                    metadata=self._metadata,
                )
            except grpc.aio.AioRpcError as failed:
                failure = classify(self._address, failed)
                wait_s = self._retry.wait_s(attempt, retry_after_s=failure.retry_after_s)
                if failure.action is Action.RAISE or self._clock.now() + wait_s > give_up_at:
                    raise SetupError(
                        f"the router does not answer ({attempt} calls): {failure.error}"
                    ) from failed
                await self._clock.sleep(wait_s)
            else:
                return [replica.address for replica in answer.replicas]

    async def open(
        self,
        session_id: str,
        *,
        context_tokens: int,
        avoid: Collection[str],
        wait_s: float,
    ) -> str | None:
        """See `Placement.open`.

        Raises:
            TimeoutError: No replica had room in time.
            ReplicaUnavailableError: The router was unreachable or had no replica until the
                deadline.
            GenerationError: The router refuses.
        """
        last = self._answers.setdefault(session_id, None)
        usable = last is not None and last.address not in avoid
        if last is not None and usable and self._clock.now() < last.valid_until:
            return last.address
        request = pb.OpenSessionRequest(
            session_id=session_id,
            context_tokens=context_tokens,
            current_address="" if last is None else last.address,
            avoid_addresses=sorted(avoid),
        )
        deadline = self._clock.now() + wait_s
        async with span("route", session_id=session_id) as trace:
            address = await self._ask_until(request, deadline, last if usable else None)
            trace.set(server=address)
            return address

    async def _ask_until(
        self, request: pb.OpenSessionRequest, deadline: float, last: _Answer | None
    ) -> str | None:
        """Calls the router until it answers or the deadline comes; `last` may be used meanwhile."""
        avoid = request.avoid_addresses
        failure: RpcFailure | None = None
        while True:
            if last is not None and self._backoff.until > self._clock.now():
                return last.address
            await self._wait_until(self._backoff.until, deadline, failure)
            answer = await self._ask(request, deadline - self._clock.now())
            if isinstance(answer, str):
                return answer
            held_before = failure is not None and isinstance(failure.error, OverloadedError)
            earlier, failure = failure, answer
            if isinstance(failure.error, OverloadedError):
                await self._wait_until(self._clock.now(), deadline, None)  # it keeps its turn
            elif held_before and isinstance(failure.error, GenerationTimeoutError):
                raise TimeoutError  # too little time was left to wait again; the router is fine
            elif failure.action is Action.WAIT:
                if avoid:
                    return None  # the caller knows when it may use the avoided replicas again
                wait_s = self._retry.wait_s(1, retry_after_s=failure.retry_after_s)
                await self._wait_until(self._clock.now() + wait_s, deadline, failure)
            elif failure.action is Action.LEAVE or isinstance(
                failure.error, GenerationTimeoutError
            ):
                self._backoff.fail(self._clock.now(), self._retry, failure.retry_after_s)
                if earlier is not None and isinstance(failure.error, GenerationTimeoutError):
                    failure = earlier  # the cause, rather than that too little time was left
            else:
                raise failure.error

    def finish(self, session_id: str) -> None:
        """See `Placement.finish`."""
        if session_id not in self._answers:
            return
        del self._answers[session_id]
        self._unsent[session_id] = None
        if len(self._unsent) > _MAX_UNSENT:
            del self._unsent[next(iter(self._unsent))]
        self._any_unsent.set()

    async def _ask(self, request: pb.OpenSessionRequest, left_s: float) -> str | RpcFailure:
        try:
            response = await self._response(request, left_s)
        except grpc.aio.AioRpcError as failed:
            return classify(self._address, failed)
        self._backoff.recover()
        self._valid_for_s = response.valid_for.ToNanoseconds() / 1e9
        self._answers[request.session_id] = _Answer(
            address=response.address, valid_until=self._clock.now() + self._valid_for_s
        )
        return response.address

    async def _response(
        self, request: pb.OpenSessionRequest, left_s: float
    ) -> pb.OpenSessionResponse:
        parent = inject()
        # A separate call: little time is left, the router records a span, or the message is long.
        if (
            left_s >= self._deadlines.server_info_s
            and not parent
            and not request.avoid_addresses
            and (response := await self._together.ask(request)) is not None
        ):
            return response
        timeout_s = min(left_s, self._deadlines.open_session_s)
        return await self._stub.OpenSession(
            request, timeout=timeout_s, metadata=(*self._metadata, *parent)
        )

    async def _wait_until(self, when: float, deadline: float, failure: RpcFailure | None) -> None:
        """Waits until `when`.

        Raises:
            TimeoutError: The deadline comes first, and only room was missing.
            ReplicaUnavailableError: The deadline comes first; the message names the failure.
        """
        now = self._clock.now()
        if max(when, now) >= deadline:
            if failure is None:
                raise TimeoutError
            raise ReplicaUnavailableError(f"router {failure.error}")
        if when > now:
            await self._clock.sleep(when - now)

    async def _send_as_they_come(self) -> None:
        while True:
            await self._any_unsent.wait()
            self._any_unsent.clear()
            if (wait_s := _SHARE_OF_VALIDITY * self._valid_for_s) > 0:
                await self._clock.sleep(wait_s)
            await self._send_all()

    async def _send_all(self) -> None:
        while self._unsent:
            session_ids = list(islice(self._unsent, _MAX_FINISHED if self._finishes_many else 1))
            if await self._send(session_ids):
                for session_id in session_ids:
                    self._unsent.pop(session_id, None)

    async def _send(self, session_ids: Sequence[str]) -> bool:
        """Reports sessions; returns False if they must be reported one by one."""
        for attempt in range(1, self._retry.max_failures + 1):
            try:
                await self._finish(session_ids)
                return True
            except grpc.aio.AioRpcError as failed:
                if failed.code() is grpc.StatusCode.NOT_FOUND:
                    return True  # the router no longer has the session, as intended
                if failed.code() is grpc.StatusCode.UNIMPLEMENTED and self._finishes_many:
                    self._finishes_many = False  # it predates the method
                    return False
                failure = classify(self._address, failed)
            await self._clock.sleep(self._retry.wait_s(attempt, retry_after_s=None))
        _log.warning(
            "the router could not be told that %d sessions are finished, such as %s; its lease "
            "will end them: %s",
            len(session_ids),
            session_ids[0],
            failure.error,
        )
        return True

    async def _finish(self, session_ids: Sequence[str]) -> None:
        timeout_s = self._deadlines.server_info_s
        if len(session_ids) > 1:
            await self._stub.FinishSessions(
                pb.FinishSessionsRequest(session_ids=session_ids),
                timeout=timeout_s,
                metadata=self._metadata,
            )
        else:
            await self._stub.FinishSession(
                pb.FinishSessionRequest(session_id=session_ids[0]),
                timeout=timeout_s,
                metadata=self._metadata,
            )
