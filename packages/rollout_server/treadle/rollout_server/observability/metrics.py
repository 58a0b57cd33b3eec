"""The metrics: a server's state and statistics for Prometheus, over HTTP.

Invariant: metrics are computed only when scraped. A scrape runs in a thread and reads plain
numbers, so neither it nor a token waits for the other. The address follows the rule of the
server's own: beyond loopback it needs TLS and the bearer token of `security`, or
`insecure_allow_plaintext_beyond_loopback`.
"""

import hmac
import logging
import socket
import ssl
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from treadle.rollout_server.address import Address
from treadle.rollout_server.config.schema import SecurityConfig
from treadle.rollout_server.engine import EngineCounters
from treadle.rollout_server.observability.server_stats import Distribution, ServerStats
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.version import server_version

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)
_POLL_S = 0.1  # Maximum delay of the shutdown.
_CALLER_S = 10.0  # Time after which a silent caller loses its thread.


class ReplicaCollector(Collector):
    """Collects the metrics of one replica on every scrape.

    Args:
        stats: Provides the counts of completions and updates that ended.
    """

    def __init__(self, replica: Replica, stats: ServerStats) -> None:
        self._replica = replica
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics; docs/operations.md describes them."""
        yield from self._server()
        yield from self._completions()
        yield from self._updates()

    def _server(self) -> Iterator[Metric]:
        replica = self._replica
        engine = replica.loaded_engine
        yield InfoMetricFamily(
            "treadle_server",
            "What serves.",
            value={
                "version": server_version(),
                "engine": replica.config.engine if engine is None else engine.info.name,
                "engine_version": "" if engine is None else engine.info.version,
            },
        )
        states = GaugeMetricFamily(
            "treadle_server_state", "1 for the state that it is in.", labels=("state",)
        )
        current = replica.state  # Read once: it may change meanwhile.
        for state in ServerState:
            states.add_metric((state.value,), float(state is current))
        yield states
        seconds = CounterMetricFamily(
            "treadle_server_seconds", "Since it started, by cause.", labels=("cause",)
        )
        for cause, value in replica.time_use.seconds().items():
            seconds.add_metric((cause.value,), value)
        yield seconds

    def _completions(self) -> Iterator[Metric]:
        admission, stats = self._replica.admission, self._stats
        yield GaugeMetricFamily(
            "treadle_completions_running", "Handed to the engine.", value=admission.in_flight
        )
        yield GaugeMetricFamily(
            "treadle_completions_queued", "Waiting for a place.", value=admission.queued
        )
        yield _by_outcome("treadle_completions", "Calls of Generate that ended.", stats.completions)
        for name, text, value in (
            ("sampled", "Sampled and sent.", stats.sampled_tokens),
            ("prompt", "Of prompts of completions that started.", stats.prompt_tokens),
            ("cached_prompt", "Of these, in the prefix cache.", stats.cached_prompt_tokens),
        ):
            yield CounterMetricFamily(f"treadle_{name}_tokens", text, value=value)
        yield from self._drafts()
        yield _histogram("treadle_queue_seconds", "From call to start.", stats.queue_s)
        yield _histogram("treadle_engine_seconds", "From start to end.", stats.engine_s)

    def _drafts(self) -> Iterator[Metric]:
        engine = self._replica.loaded_engine
        counters = EngineCounters() if engine is None else engine.counters
        for name, text, value in (
            ("sampling_passes", "Passes of a sequence that sampled.", counters.passes),
            ("drafted_tokens", "Proposed for speculative decoding.", counters.drafted),
            ("accepted_draft_tokens", "Of these, sampled.", counters.accepted),
        ):
            yield CounterMetricFamily(f"treadle_{name}", text, value=value)

    def _updates(self) -> Iterator[Metric]:
        stats = self._stats
        yield GaugeMetricFamily(
            "treadle_weight_version", "That serves.", value=self._replica.weight_version
        )
        yield _by_outcome("treadle_weight_updates", "Updates that ended.", stats.updates)
        yield CounterMetricFamily(
            "treadle_weight_update_bytes", "Of committed updates.", value=stats.update_bytes
        )
        yield _histogram(
            "treadle_weight_switch_seconds", "Generation held up for new weights.", stats.switch_s
        )


def _by_outcome(name: str, text: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=("outcome",))
    for outcome, count in dict(counts).items():
        family.add_metric((outcome,), count)
    return family


def _histogram(name: str, text: str, values: Distribution) -> Metric:
    ends = (*(str(float(bound)) for bound in values.bounds), "+Inf")
    buckets = list(zip(ends, accumulate(map(float, values.counts)), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=values.total)


@contextmanager
def serve_metrics(
    collector: Collector, address: Address, security: SecurityConfig, token: str | None
) -> Iterator[str]:
    """Serves `GET /metrics` for as long as the block lasts.

    Args:
        collector: The metrics, in addition to those of the process (CPU time, memory, files).
        security: Its certificate and key, if set, enable HTTPS.
        token: Bearer token that callers must send; None admits all callers.

    Yields:
        The address as host:port, with the actual port.

    Raises:
        OSError: The server cannot listen on the address.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    app = make_wsgi_app(registry)
    tls = _tls(security)
    try:
        server = _Server(address, tls)
    except OSError as error:
        raise OSError(
            f"cannot listen on metrics_address {address}: {error.strerror}; "
            "choose another --metrics_address, port 0 picks a free one"
        ) from error
    server.set_app(app if token is None else _guarded(app, token))
    thread = threading.Thread(
        target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True
    )
    thread.start()
    bound = str(address._replace(port=server.server_port))
    _log.info("metrics at %s://%s/metrics", "http" if tls is None else "https", bound)
    try:
        yield bound
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tls(security: SecurityConfig) -> ssl.SSLContext | None:
    if security.tls_certificate is None or security.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(security.tls_certificate, security.tls_key)
    return context


class _Server(ThreadingWSGIServer):
    """Serves each connection on a thread; the accepting thread never waits for a caller."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self.address_family = address.family
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, peer = super().get_request()
        if self._tls is not None:
            # The handshake happens at the first read, on the thread of the connection.
            connection = self._tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs the error; most often the caller disconnected, or does not use TLS."""
        _log.info("a scrape from %s failed: %s", client_address[0], sys.exception())


class _Handler(WSGIRequestHandler):
    """Logs through the logging module."""

    timeout = _CALLER_S

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


def _guarded(app: "WSGIApplication", token: str) -> "WSGIApplication":
    wanted = f"Bearer {token}".encode()

    def guarded(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        shown = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if not hmac.compare_digest(shown, wanted):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b"send the header 'Authorization: Bearer <token>'\n"]
        return app(environ, start_response)

    return guarded
