"""The server: one replica behind one port.

Invariant: the port is bound and health says NOT_SERVING before the engine loads, and
serving begins only with a loaded engine. Leaving `serve` stops admission first, lets
completions end for `shutdown_grace_s`, cancels the rest, and frees the engine last.

    async with serve(config) as server:
        print(server.address)

Everything that runs is owned by that block; nothing survives it.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from treadle.rollout.v1 import generation_service_pb2 as gen_pb
from treadle.rollout.v1 import generation_service_pb2_grpc as gen_grpc
from treadle.rollout.v1 import server_service_pb2 as srv_pb
from treadle.rollout.v1 import server_service_pb2_grpc as srv_grpc
from treadle.rollout.v1 import weight_sync_service_pb2 as sync_pb
from treadle.rollout_server.clock import Clock
from treadle.rollout_server.config import ServerConfig
from treadle.rollout_server.lifecycle import ServerState
from treadle.rollout_server.registry import EngineFactory, engine_factory
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services import weight_sync
from treadle.rollout_server.services.generation import GenerationServicer
from treadle.rollout_server.services.interceptors import Guard
from treadle.rollout_server.services.server import ServerServicer
from treadle.rollout_server.version import server_version

_log = logging.getLogger(__name__)
_HEALTHY = frozenset({ServerState.SERVING, ServerState.PAUSED, ServerState.UPDATING})
_SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (gen_pb, "GenerationService"),
        (sync_pb, "WeightSyncService"),
        (srv_pb, "ServerService"),
    )
)


class AddressUnavailable(OSError):
    """The address cannot be listened on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that serves.

    Attributes:
        address: host:port, with the port that was picked.
        replica: What is served.
    """

    address: str
    replica: Replica


@asynccontextmanager
async def serve(
    config: ServerConfig, *, factory: EngineFactory | None = None, clock: Clock | None = None
) -> AsyncIterator[Server]:
    """Runs a server for as long as the block lasts.

    Args:
        config: What to serve and where.
        factory: Builds the engine; by default that of `config.engine`.
        clock: Times leases and latency; by default the event loop.

    Raises:
        AddressUnavailable: The port is in use, or the host is not this machine.
        ValueError: There is no such engine, or it cannot be built as configured.
        OSError: A file named in the configuration cannot be read.
    """
    build = factory or engine_factory(config.engine)
    replica = Replica(config, clock or asyncio.get_running_loop())
    options = (
        # Without this a second server on the same port starts and takes half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_request_bytes),
    )
    grpc_server = grpc.aio.server(interceptors=(Guard(_token(config)),), options=options)
    health_servicer = _assemble(grpc_server, replica)
    address = f"{config.address.rpartition(':')[0]}:{_bind(grpc_server, config)}"
    changed = asyncio.Event()
    replica.lifecycle.observe(lambda _: changed.set())
    await _set_health(health_servicer, replica.state)
    await grpc_server.start()
    reporter = asyncio.create_task(_report_health(health_servicer, replica, changed))
    try:
        replica.serve(await build(config))
        await _set_health(health_servicer, replica.state)
        _log.info("engine %s serves at %s", config.engine, address)
        yield Server(address=address, replica=replica)
    finally:
        reporter.cancel()
        await health_servicer.enter_graceful_shutdown()
        replica.stop()
        # Shielded: a second cancellation must not leave sequences and threads behind.
        await asyncio.shield(_close(grpc_server, replica, config.shutdown_grace_s))
        _log.info("stopped serving at %s", address)


async def _close(grpc_server: grpc.aio.Server, replica: Replica, grace_s: float) -> None:
    await grpc_server.stop(grace_s)
    await replica.aclose()


def _assemble(grpc_server: grpc.aio.Server, replica: Replica) -> health.aio.HealthServicer:
    health_servicer = health.aio.HealthServicer()
    gen_grpc.add_GenerationServiceServicer_to_server(  # type: ignore[no-untyped-call]
        GenerationServicer(replica), grpc_server
    )
    weight_sync.add_to_server(weight_sync.WeightSyncServicer(replica), grpc_server)
    srv_grpc.add_ServerServiceServicer_to_server(  # type: ignore[no-untyped-call]
        ServerServicer(replica, server_version()), grpc_server
    )
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, grpc_server)
    names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, grpc_server)
    return health_servicer


def _bind(grpc_server: grpc.aio.Server, config: ServerConfig) -> int:
    security = config.security
    try:
        if security.tls_certificate is None or security.tls_key is None:
            return grpc_server.add_insecure_port(config.address)
        pair = (security.tls_key.read_bytes(), security.tls_certificate.read_bytes())
        return grpc_server.add_secure_port(config.address, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        cause = _why_not(config) or str(error)
        raise AddressUnavailable(
            f"cannot listen on {config.address}: {cause}; choose another --address, "
            "port 0 picks a free one"
        ) from error


def _why_not(config: ServerConfig) -> str | None:
    """The system's own words for an address that gRPC could not bind."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _token(config: ServerConfig) -> str | None:
    path = config.security.token_file
    if path is None:
        return None
    token = path.read_text().strip()
    if not token:
        raise ValueError(f"security.token_file {path} is empty: write the bearer token to it")
    return token


async def _report_health(
    servicer: health.aio.HealthServicer, replica: Replica, changed: asyncio.Event
) -> None:
    """Tells health of every change; woken by the lifecycle."""
    while True:
        await changed.wait()
        changed.clear()
        await _set_health(servicer, replica.state)


async def _set_health(servicer: health.aio.HealthServicer, state: ServerState) -> None:
    status = health_pb2.HealthCheckResponse
    value = status.SERVING if state in _HEALTHY else status.NOT_SERVING
    for service in ("", *_SERVICES):
        await servicer.set(service, value)
