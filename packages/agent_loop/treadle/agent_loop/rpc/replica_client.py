"""The client of one replica: its handshake, its back-off and its Generate calls."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import grpc.aio

from treadle.agent_loop.clock import Clock
from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.rpc.codec import decode_server_info
from treadle.agent_loop.rpc.completion_stream import GenerateCall
from treadle.agent_loop.rpc.errors import Action, classify
from treadle.agent_loop.rpc.handshake import GENERATE_MANY, ServerInfo
from treadle.agent_loop.rpc.retry import Backoff, RetryPolicy
from treadle.agent_loop.rpc.shared_call import (
    DEADLINE_S,
    MAX_REQUEST_BYTES,
    ManyCall,
    SharedCall,
)
from treadle.rollout.v1 import generation_service_pb2 as generation_pb2
from treadle.rollout.v1 import generation_service_pb2_grpc as generation_grpc
from treadle.rollout.v1 import server_service_pb2 as server_pb2
from treadle.rollout.v1 import server_service_pb2_grpc as server_grpc
from treadle.tracing import inject

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class _GenerationStub(Protocol):
    """The types of the generated stub, which has none."""

    def Generate(
        self, request: generation_pb2.GenerateRequest, *, timeout: float, metadata: Metadata
    ) -> GenerateCall: ...

    def GenerateMany(self, *, timeout: float, metadata: Metadata) -> ManyCall: ...


class _ServerStub(Protocol):
    def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[server_pb2.GetServerInfoResponse]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcDeadlines:
    """Upper bounds of calls, in seconds.

    Attributes:
        connect_s: All attempts of a handshake together; a server may still be starting.
        server_info_s: One GetServerInfo call, or one short call to a router.
        open_session_s: One OpenSession call to a router, which may hold it until there is room.
        generate_s: One completion, unless the request's own deadline is earlier.
    """

    connect_s: float = 30.0
    server_info_s: float = 5.0
    open_session_s: float = 20.0
    generate_s: float = 1800.0


@dataclass(slots=True, kw_only=True)
class ReplicaClient:
    """A replica after its handshake.

    Attributes:
        info: The replica's answer at the handshake.
        backoff: When the replica may be used again after a failure.
    """

    info: ServerInfo
    backoff: Backoff
    _stub: _GenerationStub
    _metadata: Metadata = ()
    _shared: SharedCall | None = None

    @classmethod
    async def shake_hands(
        cls,
        address: str,
        channel: grpc.aio.Channel,
        *,
        backoff: Backoff,
        metadata: Metadata,
        deadlines: RpcDeadlines,
        retry: RetryPolicy,
        clock: Clock,
        client: str,
    ) -> "ReplicaClient":
        """Performs the handshake, waiting for a server that is still starting.

        Args:
            channel: To it; the caller closes it.
            retry: Bounds of the waits between attempts.
            client: Names the caller in the server's log.

        Raises:
            SetupError: The server did not answer within `connect_s`, or refused.
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
                    backoff=backoff,
                    _stub=cast(Any, generation_grpc).GenerationServiceStub(channel),
                    _metadata=metadata,
                )

    def generate(
        self, message: generation_pb2.GenerateRequest, *, timeout_s: float
    ) -> GenerateCall:
        """Starts a completion; its reader must end it (`completion_stream.read`).

        It shares one call with the server's others, unless the server cannot, or the request is
        large.
        """
        if GENERATE_MANY not in self.info.capabilities or message.ByteSize() > MAX_REQUEST_BYTES:
            return self._stub.Generate(
                message, timeout=timeout_s, metadata=(*self._metadata, *inject())
            )
        if self._shared is None or self._shared.ended:
            self._shared = SharedCall(
                self._stub.GenerateMany(timeout=DEADLINE_S, metadata=self._metadata)
            )
        span = next((value for _, value in inject()), "")
        return self._shared.generate(message, timeout_s=timeout_s, traceparent=span)

    async def aclose(self) -> None:
        """Ends the call that completions share; it needs the channel."""
        if self._shared is not None:
            await self._shared.aclose()
