"""The metrics of a server that works, read over HTTP."""

import asyncio
import logging
import queue
import shutil
import socket
import ssl
import struct
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from treadle.conformance.client.stubs import Stubs, stubs_for
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.address import Address
from treadle.rollout_server.config.schema import SecurityConfig, ServerConfig
from treadle.rollout_server.engine import ElementType, ModelInfo, TensorSpec
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.observability.metrics import serve_metrics
from treadle.rollout_server.observability.server_stats import Distribution
from treadle.rollout_server.server import Server
from treadle.rollout_server.testing import serve_in_process

SPEC = TensorSpec(name="w", element_type=ElementType.FLOAT32, shape=(0,))
METRICS = ServerConfig(metrics_address="127.0.0.1:0")


class Counted:
    """A server, and its metrics as they are now."""

    def __init__(self, server: Server, stubs: Stubs, token: str = "") -> None:
        self.server = server
        self.stubs = stubs
        self.token = token

    async def read(self) -> dict[str, float]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> dict[str, float]:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        url = f"http://{self.server.metrics_address}/metrics"
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return {
                sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
                for family in families
                for sample in family.samples
            }


@asynccontextmanager
async def counted(config: ServerConfig = METRICS, token: str = "") -> AsyncIterator[Counted]:
    model = ModelInfo(architecture="x", vocab_size=9, context_length=64, eos_token_ids=frozenset())
    engine = FakeEngine(model=model, clock=asyncio.get_running_loop(), parameters=(SPEC,))
    async with (
        serve_in_process(engine, config=config) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield Counted(server, stubs_for(channel), token)


def wanted(**fields: Any) -> gen.GenerateRequest:
    return gen.GenerateRequest(
        request_id="r",
        prompt_token_ids=[1] * 40,
        sampling=gen.SamplingParams(max_tokens=4, seed=1, ignore_eos=True),
        logprob_mode=gen.LOGPROB_MODE_SAMPLED,
        **fields,
    )


@pytest.mark.asyncio
async def test_completions_are_counted_by_their_outcome() -> None:
    async with counted() as it:
        before = await it.read()
        for _ in range(2):
            async for _ in it.stubs.generation.Generate(wanted(), timeout=60):
                pass
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in it.stubs.generation.Generate(wanted(min_weight_version=7), timeout=60):
                pass
        after = await it.read()
    assert before["treadle_sampled_tokens_total"] == 0
    assert before["treadle_drafted_tokens_total"] == before["treadle_sampling_passes_total"] == 0
    assert before["treadle_server_state serving"] == 1
    assert after["treadle_completions_total length"] == 2
    assert after["treadle_completions_total weight_version_behind"] == 1
    assert after["treadle_sampled_tokens_total"] == 8
    assert after["treadle_prompt_tokens_total"] == 80
    assert 0 < after["treadle_cached_prompt_tokens_total"] < 40
    assert after["treadle_queue_seconds_count"] == after["treadle_engine_seconds_count"] == 2
    assert after["treadle_queue_seconds_bucket +Inf"] == 2
    assert after["treadle_completions_running"] == after["treadle_completions_queued"] == 0
    assert after["process_resident_memory_bytes"] > 0


@pytest.mark.asyncio
async def test_updates_are_counted_with_their_bytes_and_time() -> None:
    async with counted() as it:
        tensor = sync.TensorSpec(name="w", element_type=sync.ELEMENT_TYPE_FLOAT32, shape=[0])
        for version, update_id in ((1, "a"), (2, "b")):
            await it.stubs.weights.BeginUpdate(
                sync.BeginUpdateRequest(
                    update_id=update_id,
                    weight_version=version,
                    tensors=[tensor],
                    lease={"seconds": 60},
                    inline=sync.InlineTransport(),
                ),
                timeout=60,
            )
            if version == 1:
                commit = sync.CommitUpdateRequest(
                    update_id=update_id, in_flight=sync.IN_FLIGHT_POLICY_DRAIN
                )
                await it.stubs.weights.CommitUpdate(commit, timeout=60)
        await it.stubs.weights.AbortUpdate(sync.AbortUpdateRequest(update_id="b"), timeout=60)
        after = await it.read()
    assert after["treadle_weight_version"] == 1
    assert after["treadle_weight_updates_total committed"] == 1
    assert after["treadle_weight_updates_total aborted"] == 1
    assert after["treadle_weight_switch_seconds_count"] == 1


@pytest.mark.asyncio
async def test_every_second_has_a_cause_which_the_contract_tells_too() -> None:
    async with counted() as it:
        async for _ in it.stubs.generation.Generate(wanted(), timeout=60):
            pass
        await it.stubs.control.Pause(
            srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN), timeout=60
        )
        info = await it.stubs.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
        after = await it.read()
    told = {
        field.name: getattr(info.time_use, field.name).ToTimedelta().total_seconds()
        for field in info.time_use.DESCRIPTOR.fields
    }
    shown = {cause: after[f"treadle_server_seconds_total {cause}"] for cause in told}
    for cause in ("starting", "prefill", "decode", "waiting"):
        assert shown[cause] == pytest.approx(told[cause], abs=1e-6)
        assert shown[cause] > 0
    assert shown["weights"] > told["weights"] > 0  # the pause lasts
    assert shown["memory"] == shown["failed"] == 0


@pytest.mark.asyncio
async def test_a_server_with_a_token_shows_its_metrics_to_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    config = METRICS.model_copy(update={"security": SecurityConfig(token_file=path)})
    async with counted(config, token="secret") as it:
        assert (await it.read())["treadle_weight_version"] == 0
        it.token = "guess"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            await it.read()


def test_metrics_beyond_loopback_need_what_the_server_needs() -> None:
    with pytest.raises(ValueError, match=r"metrics_address '0\.0\.0\.0:9' is reachable from other"):
        ServerConfig(metrics_address="0.0.0.0:9")
    with pytest.raises(ValueError, match="metrics_address is '9', expected host:port"):
        ServerConfig(metrics_address="9")


@pytest.mark.asyncio
async def test_an_address_in_use_is_named() -> None:
    async with counted() as it:
        taken = ServerConfig(metrics_address=it.server.metrics_address)
        with pytest.raises(OSError, match=r"metrics_address 127\.0\.0\.1:[0-9]+: Address already"):
            async with counted(taken):
                pass


class Nothing(Collector):
    """Has no metrics."""

    def collect(self) -> Iterable[Metric]:
        return ()


def fetch(url: str, tls: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, context=tls) as answer:
        return str(answer.read().decode())


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_nobody_waits_for_a_caller_who_never_says_hello(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(words.split(), check=True, capture_output=True)
    security = SecurityConfig(tls_certificate=certificate, tls_key=key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with serve_metrics(Nothing(), Address("127.0.0.1", 0), security, None) as bound:
        with connected(bound):
            assert "process_cpu_seconds_total" in fetch(f"https://{bound}/metrics", trusting)
        silent = connected(bound)
    # Left although somebody was connected and had said nothing.
    silent.close()


def test_a_caller_who_breaks_off_is_a_line_in_the_log(
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    monkeypatch.setattr(caplog.handler, "emit", lines.put)
    caplog.set_level(logging.INFO)
    plain = SecurityConfig()
    with serve_metrics(Nothing(), Address("127.0.0.1", 0), plain, None) as bound:
        with connected(bound) as caller:
            reset = struct.pack("ii", 1, 0)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            caller.send(b"GET /metr")
        while "scrape" not in (line := lines.get(timeout=60)).msg:
            pass
    assert "a scrape from 127.0.0.1 failed: [Errno 104]" in line.getMessage()
    assert capfd.readouterr().err == "", "what is no log line breaks --log_format json"


@pytest.mark.skipif(Address("::1", 0).why_not() != "", reason="this machine has no IPv6")
def test_an_address_may_be_of_version_6() -> None:
    with serve_metrics(Nothing(), Address.parse("[::1]:0"), SecurityConfig(), None) as bound:
        assert bound.startswith("[::1]:")
        assert "process_cpu_seconds_total" in fetch(f"http://{bound}/metrics")


def test_a_bound_belongs_to_what_is_below_it() -> None:
    values = Distribution((1, 2))
    for value in (0.5, 1, 1.5, 3):
        values.add(value)
    assert values.counts == (2, 1, 1)
    assert values.total == 6
