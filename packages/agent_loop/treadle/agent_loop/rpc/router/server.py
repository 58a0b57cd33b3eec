"""The routing service: the placement policies behind gRPC, so that many workers share one view.

Invariants:

1. An OpenSession call that finds no room is held until there is room, at most for `hold_s` and for
   nine tenths of its deadline, so that the caller gets an answer before its deadline.
2. A change of the replicas is in the state file before the call that made it is answered, so a
   restarted router has it. Sessions come back with their next OpenSession, which contains their
   replica.

    async with serve_router(config) as address:
        ...

Who waits: OpenSession calls, in the queue. Leaving the block refuses new calls, waits
`shutdown_grace_s` for the calls in flight, and cancels the rest. Workers continue with their last
answers.
"""

import logging
from collections.abc import AsyncIterator, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from treadle.agent_loop.clock import Clock, LoopClock
from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.extras import needs_extra
from treadle.agent_loop.routing.placement import HashedSession, StickySession
from treadle.agent_loop.rpc.router.guard import RouterFault, RouterGuard, duration, invalid
from treadle.agent_loop.rpc.router.session_queue import SessionQueue
from treadle.agent_loop.rpc.router.state import check_address, is_address, read_state, write_state
from treadle.agent_loop.rpc.token_guard import Context
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import routing_service_pb2 as pb
from treadle.rollout.v1 import routing_service_pb2_grpc as pb_grpc
from treadle.tracing import TraceSink, service_sink, serving_span

with needs_extra("router", __name__):
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

_log = logging.getLogger(__name__)
_SERVICE = pb.DESCRIPTOR.services_by_name["RoutingService"].full_name
_NO_REPLICA_RETRY_S = 1.0
_SHARE_OF_DEADLINE = 0.9
MAX_ID_BYTES = 128
"""As the rollout servers accept."""
MAX_SESSIONS = 1024
"""Sessions of one call."""
MAX_AVOIDED = 4096
"""Replicas that a session is to avoid."""
_MAX_REQUEST_BYTES = 2 << 20
"""A session that avoids this many replicas with the longest names has half as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The configuration of a router.

    Attributes:
        address: host:port to listen on; port 0 picks one.
        policy: A policy without replicas; the router becomes its owner.
        replicas: The replicas at start, in addition to those of the state file.
        lease_s: Sessions that are idle for longer are dropped. Must exceed the duration of any
            tool call and any completion.
        valid_for_s: How long workers may reuse an answer.
        hold_s: Maximum time that a call waits for room.
        state_file: Keeps the replicas across restarts; None means that they are not kept.
        tls: PEM private key and PEM certificate chain; None means plain text.
        token: Required of callers; None admits everyone.
        shutdown_grace_s: Time limit for calls in flight at shutdown.
        tracing_jsonl: File for the spans of calls whose callers record theirs; None means no file.
        tracing_otlp: OpenTelemetry endpoint for them; None means none.
    """

    address: str = "127.0.0.1:0"
    policy: StickySession | HashedSession = field(default_factory=StickySession)
    replicas: tuple[str, ...] = ()
    lease_s: float = 3600.0
    valid_for_s: float = 0.0
    hold_s: float = 10.0
    state_file: Path | None = None
    tls: tuple[bytes, bytes] | None = None
    token: str | None = None
    shutdown_grace_s: float = 1.0
    tracing_jsonl: Path | None = None
    tracing_otlp: str | None = None


class RoutingServicer(pb_grpc.RoutingServiceServicer):
    """The gRPC methods of the routing service.

    Args:
        sink: Where the spans of calls go whose callers record their traces.
    """

    def __init__(self, queue: SessionQueue, config: RouterConfig, sink: TraceSink) -> None:
        self._queue = queue
        self._config = config
        self._sink = sink

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionResponse:
        """Returns the session's replica, waiting for room."""
        with serving_span(
            self._sink,
            context.invocation_metadata,
            "router.open_session",
            session_id=request.session_id,
        ) as trace:
            response = await self._open_session(request, context)
            trace.set(server=response.address, moved=response.moved)
            return response

    async def _open_session(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionResponse:
        session_id, before = self._checked(request)
        left_s = _SHARE_OF_DEADLINE * (context.time_remaining() or 0.0)
        try:
            address = await self._queue.open(
                session_id,
                context_tokens=request.context_tokens,
                at=request.current_address or None,
                avoid=request.avoid_addresses,
                wait_s=min(self._config.hold_s, left_s),
            )
        except TimeoutError:
            raise RouterFault(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                errors_pb2.ERROR_REASON_OVERLOADED,
                f"no replica has room for session {session_id}; it keeps its turn",
                retry_after_s=0.0,
            ) from None
        if address is None:
            router = self._queue.router
            raise RouterFault(
                grpc.StatusCode.UNAVAILABLE,
                errors_pb2.ERROR_REASON_NO_REPLICA,
                f"none of {len(router.addresses)} replicas accepts session {session_id}: "
                f"{len(router.draining)} drain, {len(request.avoid_addresses)} are to be avoided",
                retry_after_s=_NO_REPLICA_RETRY_S,
            )
        return self._answer(address, before)

    async def OpenSessions(
        self, request: pb.OpenSessionsRequest, context: Context
    ) -> pb.OpenSessionsResponse:
        """Returns the replicas of sessions that need not wait for room."""
        _check_count("sessions", request.sessions)
        return pb.OpenSessionsResponse(answers=map(self._open_now, request.sessions))

    def _open_now(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        try:
            session_id, before = self._checked(request)
        except RouterFault:  # OpenSession says it, to this session only
            return pb.OpenSessionResponse()
        address = self._queue.open_now(
            session_id,
            context_tokens=request.context_tokens,
            at=request.current_address or None,
            avoid=request.avoid_addresses,
        )
        return pb.OpenSessionResponse() if address is None else self._answer(address, before)

    def _checked(self, request: pb.OpenSessionRequest) -> tuple[str, str]:
        """Returns the session's id, and its replica so far; "" if it has none.

        Raises:
            RouterFault: The request is not valid.
        """
        session_id = _session_id(request.session_id)
        if len(request.avoid_addresses) > MAX_AVOIDED:
            received = f"{len(request.avoid_addresses)} values"
            raise invalid("avoid_addresses", received, f"at most {MAX_AVOIDED}")
        return session_id, self._queue.router.pinned(session_id) or request.current_address

    def _answer(self, address: str, before: str) -> pb.OpenSessionResponse:
        return pb.OpenSessionResponse(
            address=address,
            moved=bool(before) and before != address,
            valid_for=duration(self._config.valid_for_s),
        )

    async def FinishSessions(
        self, request: pb.FinishSessionsRequest, context: Context
    ) -> pb.FinishSessionsResponse:
        """Frees the slots of sessions."""
        _check_count("session_ids", request.session_ids)
        for session_id in request.session_ids:
            self._queue.close(session_id)
        return pb.FinishSessionsResponse()

    async def FinishSession(
        self, request: pb.FinishSessionRequest, context: Context
    ) -> pb.FinishSessionResponse:
        """Frees the session's slot."""
        session_id = _session_id(request.session_id)
        if not self._queue.close(session_id):
            raise RouterFault(
                grpc.StatusCode.NOT_FOUND,
                errors_pb2.ERROR_REASON_SESSION_UNKNOWN,
                f"session {session_id} is not open: it was never opened, was finished, or its "
                f"lease of {self._config.lease_s:g} s expired",
            )
        return pb.FinishSessionResponse()

    async def RegisterReplica(
        self, request: pb.RegisterReplicaRequest, context: Context
    ) -> pb.RegisterReplicaResponse:
        """Adds a replica, or ends the draining of one."""
        self._queue.add(_address(request.address))
        self._save()
        return pb.RegisterReplicaResponse()

    async def DrainReplica(
        self, request: pb.DrainReplicaRequest, context: Context
    ) -> pb.DrainReplicaResponse:
        """Stops giving a replica new sessions."""
        address = _address(request.address)
        known = self._queue.router.addresses
        if address not in known:
            raise invalid("address", address, f"one of {', '.join(known) or 'no replicas'}")
        open_sessions = self._queue.drain(address)
        self._save()
        return pb.DrainReplicaResponse(open_sessions=open_sessions)

    async def RemoveReplica(
        self, request: pb.RemoveReplicaRequest, context: Context
    ) -> pb.RemoveReplicaResponse:
        """Removes a replica at once."""
        self._queue.remove(_address(request.address))
        self._save()
        return pb.RemoveReplicaResponse()

    async def ListReplicas(
        self, request: pb.ListReplicasRequest, context: Context
    ) -> pb.ListReplicasResponse:
        """Returns the replicas and their loads."""
        router = self._queue.router
        occupied_s = self._queue.occupancy.seconds()
        return pb.ListReplicasResponse(
            replicas=[
                pb.Replica(
                    address=address,
                    draining=address in router.draining,
                    open_sessions=router.load(address),
                    occupied_time=duration(occupied_s.get(address, 0.0)),
                )
                for address in router.addresses
            ]
        )

    def _save(self) -> None:
        if self._config.state_file is not None:
            write_state(self._config.state_file, self._queue)


@asynccontextmanager
async def serve_router(config: RouterConfig, *, clock: Clock | None = None) -> AsyncIterator[str]:
    """Runs a router while the block runs; yields its address.

    Args:
        clock: Times the leases; None means the event loop's clock.

    Raises:
        SetupError: The router cannot listen on the address, a replica's address is invalid, or
            the state file cannot be read.
        OSError: The file of the spans cannot be opened.
        ValueError: OpenTelemetry is not installed, or its address is none.
    """
    with service_sink(
        jsonl=config.tracing_jsonl, otlp=config.tracing_otlp, service="treadle-router"
    ) as sink:
        async with _serve(config, sink, clock or LoopClock()) as address:
            yield address


@asynccontextmanager
async def _serve(config: RouterConfig, sink: TraceSink, clock: Clock) -> AsyncIterator[str]:
    queue = SessionQueue(config.policy, clock=clock, lease_s=config.lease_s)
    for replica in config.replicas:
        check_address(replica)
        queue.add(replica)
    if config.state_file is not None:
        read_state(config.state_file, queue)
    server = grpc.aio.server(
        interceptors=(RouterGuard(config.token),),
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
            # Workers ping every 20 s (`security`), which gRPC's default would refuse.
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ),
    )
    pb_grpc.add_RoutingServiceServicer_to_server(RoutingServicer(queue, config, sink), server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    address = f"{config.address.rpartition(':')[0]}:{_bind(server, config)}"
    await server.start()
    for service in ("", _SERVICE):
        await health_servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    _log.info("serving %d replicas at %s", len(queue.router.addresses), address)
    try:
        yield address
    finally:
        await health_servicer.enter_graceful_shutdown()
        await server.stop(config.shutdown_grace_s)


def _bind(server: grpc.aio.Server, config: RouterConfig) -> int:
    try:
        if config.tls is None:
            return server.add_insecure_port(config.address)
        return server.add_secure_port(config.address, grpc.ssl_server_credentials([config.tls]))
    except RuntimeError as error:
        raise SetupError(
            f"cannot listen on {config.address}: {error}; choose another address, or port 0 for "
            "a free port"
        ) from error


def _check_count(name: str, values: Sized) -> None:
    if len(values) > MAX_SESSIONS:
        raise invalid(name, f"{len(values)} values", f"at most {MAX_SESSIONS}")


def _address(address: str) -> str:
    if not is_address(address):
        raise invalid("address", address, "host:port, as 10.0.0.1:4000")
    return address


def _session_id(value: str) -> str:
    if not 1 <= len(value.encode()) <= MAX_ID_BYTES:
        expected = f"the trajectory's id, of 1 to {MAX_ID_BYTES} bytes"
        raise invalid("session_id", value, expected)
    return value
