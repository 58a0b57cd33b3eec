"""The server: one replica behind one port.

Invariant: the port is bound and health reports NOT_SERVING before the engine loads, and
serving begins only with a loaded engine. Leaving `serve` first stops admission, then lets
completions finish for `shutdown_grace_s`, cancels the rest, and frees the engine last.

    async with serve(config) as server:
        print(server.address)

That block owns everything that runs; nothing survives it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from treadle.rollout.v1 import generation_service_pb2 as gen_pb
from treadle.rollout.v1 import server_service_pb2 as srv_pb
from treadle.rollout.v1 import server_service_pb2_grpc as srv_grpc
from treadle.rollout.v1 import weight_sync_service_pb2 as sync_pb
from treadle.rollout_server.address import Address
from treadle.rollout_server.clock import Clock
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.observability.server_stats import ServerStats
from treadle.rollout_server.registry import EngineFactory, engine_factory
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.services import generate_many, generation, weight_sync
from treadle.rollout_server.services.interceptors import Guard
from treadle.rollout_server.services.methods import Methods
from treadle.rollout_server.services.server import ServerServicer
from treadle.rollout_server.version import server_version
from treadle.tracing import TraceSink, service_sink

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


_KEEPALIVE = (
    # A caller whose host is gone closes no connection: without pings its completions would run on,
    # and its update would hold the server until the lease ends.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # what gRPC 1.85 goes by
    ("grpc.http2.max_pings_without_data", 0),
    # Callers may ping as often; by default gRPC cuts such a caller off.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class AddressUnavailable(OSError):
    """The server cannot listen on the address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server.

    Attributes:
        address: host:port, with the port that was picked.
        metrics_address: host:port of its metrics; None when it has none.
    """

    address: str
    replica: Replica
    metrics_address: str | None = None


@asynccontextmanager
async def serve(
    config: ServerConfig, *, factory: EngineFactory | None = None, clock: Clock | None = None
) -> AsyncIterator[Server]:
    """Runs a server for as long as the block lasts.

    Args:
        factory: Builds the engine; default: the factory of `config.engine`.
        clock: Times leases and latency; default: the event loop.

    Raises:
        AddressUnavailable: The port is in use, or the host is not this machine.
        OSError: The server cannot listen on the metrics' address, or cannot read a file that the
            configuration names.
        ValueError: There is no such engine, or it cannot be built as configured.
    """
    build = factory or engine_factory(config.engine)
    replica = Replica(config, clock or asyncio.get_running_loop())
    options = (
        # Without this a second server on the same port starts and takes half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_request_bytes),
        *_KEEPALIVE,
    )
    token = _token(config)
    stats = ServerStats()
    stats.count_updates(replica.current_update)
    stats.time_switches(replica.lifecycle, replica.clock.time)
    grpc_server = grpc.aio.server(interceptors=(Guard(token),), options=options)
    with (
        service_sink(
            jsonl=config.tracing.jsonl, otlp=config.tracing.otlp, service="treadle-rollout-server"
        ) as sink,
        _metrics(config, replica, stats, token) as metrics_address,
    ):
        health_servicer = _assemble(grpc_server, replica, stats, sink)
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
            yield Server(address=address, replica=replica, metrics_address=metrics_address)
        finally:
            reporter.cancel()
            await health_servicer.enter_graceful_shutdown()
            replica.stop()
            # Shielded: a second cancellation must not leave sequences and threads behind.
            await asyncio.shield(_close(grpc_server, replica, config.shutdown_grace_s))
            _log.info("stopped serving at %s", address)


@contextmanager
def _metrics(
    config: ServerConfig, replica: Replica, stats: ServerStats, token: str | None
) -> Iterator[str | None]:
    if config.metrics_address is None:
        yield None
        return
    # Imported late: it takes a tenth as long as gRPC, and most servers start for a test.
    from treadle.rollout_server.observability.metrics import ReplicaCollector, serve_metrics

    collector = ReplicaCollector(replica, stats)
    address = Address.parse(config.metrics_address)
    with serve_metrics(collector, address, config.security, token) as bound:
        yield bound


async def _close(grpc_server: grpc.aio.Server, replica: Replica, grace_s: float) -> None:
    await grpc_server.stop(grace_s)
    await replica.aclose()


def _assemble(
    grpc_server: grpc.aio.Server, replica: Replica, stats: ServerStats, sink: TraceSink
) -> health.aio.HealthServicer:
    health_servicer = health.aio.HealthServicer()
    methods = Methods()
    servicer = generation.GenerationServicer(replica, stats, sink)
    generation.add_to_server(servicer, methods)
    many = generate_many.GenerateManyServicer(servicer, replica.lifecycle)
    generate_many.add_to_server(many, methods)
    weight_sync.add_to_server(weight_sync.WeightSyncServicer(replica), methods)
    srv_grpc.add_ServerServiceServicer_to_server(ServerServicer(replica, server_version()), methods)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, methods)
    grpc_server.add_generic_rpc_handlers((methods,))
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
        cause = Address.parse(config.address).why_not() or str(error)
        raise AddressUnavailable(
            f"cannot listen on {config.address}: {cause}; choose another --address, "
            "port 0 picks a free one"
        ) from error


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
    """Reports every change to the health service; woken by the lifecycle."""
    while True:
        await changed.wait()
        changed.clear()
        await _set_health(servicer, replica.state)


async def _set_health(servicer: health.aio.HealthServicer, state: ServerState) -> None:
    status = health_pb2.HealthCheckResponse
    value = status.SERVING if state in _HEALTHY else status.NOT_SERVING
    for service in ("", *_SERVICES):
        await servicer.set(service, value)
