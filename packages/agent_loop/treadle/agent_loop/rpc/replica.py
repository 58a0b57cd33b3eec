"""The replica: one server as the client knows it: its channel, its handshake, its health.

Invariant: `Rest.until` only moves forward while failures last, and is forgotten at the first
success. Failures that come in while a replica rests are of the same trouble and do not make its
rest longer. One event loop owns it.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import grpc.aio

from treadle.agent_loop.clock import Clock
from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.rpc.codec import decode_server_info
from treadle.agent_loop.rpc.completion_stream import GenerateCall
from treadle.agent_loop.rpc.errors import Action, classify
from treadle.agent_loop.rpc.handshake import ServerInfo
from treadle.agent_loop.rpc.retry import RetryPolicy
from treadle.rollout.v1 import generation_service_pb2 as generation_pb2
from treadle.rollout.v1 import generation_service_pb2_grpc as generation_grpc
from treadle.rollout.v1 import server_service_pb2 as server_pb2
from treadle.rollout.v1 import server_service_pb2_grpc as server_grpc
from treadle.tracing import inject

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class _GenerationStub(Protocol):
    """The generated stub, which has no types."""

    def Generate(
        self, request: generation_pb2.GenerateRequest, *, timeout: float, metadata: Metadata
    ) -> GenerateCall: ...


class _ServerStub(Protocol):
    def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[server_pb2.GetServerInfoResponse]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcDeadlines:
    """Upper bounds of calls, in seconds.

    Attributes:
        connect_s: From the first handshake call to the last, for a server that is starting.
        server_info_s: One GetServerInfo, or one short call to a router.
        open_session_s: One question to a router, which may hold it until there is room.
        generate_s: One completion, when the request's own deadline is not sooner.
    """

    connect_s: float = 30.0
    server_info_s: float = 5.0
    open_session_s: float = 20.0
    generate_s: float = 1800.0


@dataclass(slots=True, kw_only=True)
class Rest:
    """How long an address is left alone.

    Attributes:
        until: No request is sent before; clock seconds.
    """

    until: float = 0.0
    _failures_in_a_row: int = 0

    def fail(self, now: float, retry: RetryPolicy, retry_after_s: float | None) -> None:
        """Notes a failure: no request is sent for a while."""
        if now < self.until:
            return
        self._failures_in_a_row += 1
        self.until = now + retry.wait_s(self._failures_in_a_row, retry_after_s=retry_after_s)

    def recover(self) -> None:
        """Notes a success."""
        self._failures_in_a_row = 0
        self.until = 0.0


@dataclass(slots=True, kw_only=True)
class Replica:
    """One server.

    Attributes:
        info: What it said at the handshake.
        rest: How long it is left alone.
    """

    info: ServerInfo
    rest: Rest
    _stub: _GenerationStub
    _metadata: Metadata = ()

    @classmethod
    async def shake_hands(
        cls,
        address: str,
        channel: grpc.aio.Channel,
        *,
        rest: Rest,
        metadata: Metadata,
        deadlines: RpcDeadlines,
        retry: RetryPolicy,
        clock: Clock,
        client: str,
    ) -> "Replica":
        """Asks a server what it is, waiting for one that is still starting.

        Raises:
            SetupError: It did not answer within `connect_s`, or refused.
        """
        stub: _ServerStub = cast(Any, server_grpc).ServerServiceStub(channel)
        give_up_at = clock.now() + deadlines.connect_s
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = await stub.GetServerInfo(
                    server_pb2.GetServerInfoRequest(client=client),
                    timeout=deadlines.server_info_s,
                    metadata=metadata,
                )
            except grpc.aio.AioRpcError as failed:
                failure = classify(address, failed)
                wait_s = retry.wait_s(attempt, retry_after_s=failure.retry_after_s)
                if failure.action is Action.RAISE:
                    raise SetupError(
                        f"the rollout server refuses the handshake: {failure.error}"
                    ) from failed
                if clock.now() + wait_s > give_up_at:
                    raise SetupError(
                        f"the rollout server does not answer ({attempt} calls): {failure.error}"
                    ) from failed
                await clock.sleep(wait_s)
            else:
                return cls(
                    info=decode_server_info(address, answer),
                    rest=rest,
                    _stub=cast(Any, generation_grpc).GenerationServiceStub(channel),
                    _metadata=metadata,
                )

    def generate(
        self, message: generation_pb2.GenerateRequest, *, timeout_s: float
    ) -> GenerateCall:
        """Starts a call; whoever reads it ends it (`completion_stream.read`)."""
        return self._stub.Generate(
            message, timeout=timeout_s, metadata=(*self._metadata, *inject())
        )
