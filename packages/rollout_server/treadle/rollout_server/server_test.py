"""Assembly: health, reflection, security, ports, shutdown."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.config.schema import SecurityConfig, ServerConfig
from treadle.rollout_server.engine import (
    ElementType,
    Engine,
    InFlightPolicy,
    ModelInfo,
    NamedTensor,
    TensorSpec,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine, FakeLatency
from treadle.rollout_server.errors import EngineFailed, UpdateUnknown
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.server import AddressUnavailable, serve
from treadle.rollout_server.testing import FakeClock, held_address, serve_in_process
from treadle.rollout_server.updates.begin import Begin

MODEL = ModelInfo(architecture="fake", vocab_size=64, context_length=64)
STATUS = health_pb2.HealthCheckResponse


def fake(latency_s: float = 0.0) -> FakeEngine:
    latency = FakeLatency(decode_s_per_token=latency_s)
    return FakeEngine(model=MODEL, latency=latency, clock=FakeClock())


def want() -> gen.GenerateRequest:
    return gen.GenerateRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling=gen.SamplingParams(max_tokens=2),
        logprob_mode=gen.LOGPROB_MODE_NONE,
    )


class Broken(FakeEngine):
    """Raises in the middle of a sequence."""

    async def _run(self, *arguments: Any) -> Any:
        async for event in super()._run(*arguments):
            yield event
            raise RuntimeError("out of memory")


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


async def health_of(channel: grpc.aio.Channel, service: str = "") -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return (await stub.Check(request, timeout=60)).status


@pytest.mark.asyncio
async def test_an_engine_that_fails_takes_the_server_out_of_service() -> None:
    engine = Broken(model=MODEL, clock=FakeClock())
    async with serve_in_process(engine) as server, channel_to(server.address) as channel:
        assert await health_of(channel) == STATUS.SERVING
        assert await health_of(channel, "treadle.rollout.v1.GenerationService") == STATUS.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="RuntimeError: out of memory") as caught:
            async for _ in stubs_for(channel).generation.Generate(want(), timeout=60):
                pass
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for update in watch:
            if update.status == STATUS.NOT_SERVING:
                break
        watch.cancel()
        control = stubs_for(channel).control
        info = await control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
        assert info.state == srv.SERVER_STATE_FAILED


@pytest.fixture
def address() -> Iterator[str]:
    with held_address() as held:
        yield held


@pytest.mark.asyncio
async def test_while_the_engine_loads_the_server_answers_loading(address: str) -> None:
    loading, loaded = asyncio.Event(), asyncio.Event()
    config = ServerConfig(address=address)

    async def factory(_: ServerConfig) -> Engine:
        loading.set()
        await loaded.wait()
        return fake()

    async def run() -> None:
        async with serve(config, factory=factory):
            pass

    running = asyncio.create_task(run())
    await loading.wait()
    async with channel_to(config.address) as channel:
        assert await health_of(channel) == STATUS.NOT_SERVING
        info = await stubs_for(channel).control.GetServerInfo(
            srv.GetServerInfoRequest(), timeout=60
        )
        assert info.state == srv.SERVER_STATE_LOADING
        with pytest.raises(grpc.aio.AioRpcError, match="the server is loading"):
            async for _ in stubs_for(channel).generation.Generate(want(), timeout=60):
                pass
    loaded.set()
    await running


@pytest.mark.asyncio
async def test_a_port_in_use_is_an_error_that_says_so() -> None:
    async with serve_in_process(fake()) as server:
        config = ServerConfig(address=server.address)
        with pytest.raises(AddressUnavailable, match=f"{server.address}: Address already in use"):
            async with serve_in_process(fake(), config=config):
                pass
    with pytest.raises(AddressUnavailable, match="cannot listen on"):
        outside = ServerConfig(address="192.0.2.1:0", insecure_allow_plaintext_beyond_loopback=True)
        async with serve_in_process(fake(), config=outside):
            pass


@pytest.mark.asyncio
async def test_reflection_lists_the_services() -> None:
    async with serve_in_process(fake()) as server, channel_to(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=60)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        call.cancel()
    names = {service.name for service in answer.list_services_response.service}
    assert {"treadle.rollout.v1.GenerationService", "grpc.health.v1.Health"} <= names


@pytest.mark.asyncio
async def test_shutdown_aborts_what_outlives_the_grace() -> None:
    engine = fake(latency_s=1.0)
    config = ServerConfig(shutdown_grace_s=0.0)
    async with serve_in_process(engine, config=config) as server:
        channel = grpc.aio.insecure_channel(server.address)
        call: Any = stubs_for(channel).generation.Generate(want(), timeout=60)
        await call.read()
        assert engine.counters.running == 1
    assert engine.counters.running == 0
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    await channel.close()


@pytest.mark.asyncio
async def test_shutdown_lets_completions_end_within_the_grace() -> None:
    clock = FakeClock()
    engine = FakeEngine(model=MODEL, latency=FakeLatency(decode_s_per_token=1.0), clock=clock)
    ending = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with serve_in_process(engine, config=ServerConfig(shutdown_grace_s=30.0)) as server:
            address.set_result(server.address)
            await ending.wait()

    running = asyncio.create_task(run())
    async with channel_to(await address) as channel:
        stub = stubs_for(channel).generation
        call: Any = stub.Generate(want(), timeout=60)
        await call.read()
        ending.set()
        messages: list[Any] = []
        reading = asyncio.create_task(_rest(call, messages))
        while not reading.done():
            clock.advance(1.0)
            await asyncio.wait({reading}, timeout=0.01)
    await running
    assert messages[-1].finished.num_tokens >= 1
    assert engine.counters.aborted == 0


async def _rest(call: Any, messages: list[Any]) -> None:
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)


@pytest.mark.asyncio
async def test_the_token_is_required_of_all_but_health(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    config = ServerConfig(security=SecurityConfig(token_file=path))
    async with (
        serve_in_process(fake(), config=config) as server,
        channel_to(server.address) as channel,
    ):
        assert await health_of(channel) == STATUS.SERVING
        info = stubs_for(channel).control.GetServerInfo
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError, match="token") as caught:
                await info(srv.GetServerInfoRequest(), timeout=60, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        right = (("authorization", "Bearer s3cret"),)
        assert (await info(srv.GetServerInfoRequest(), timeout=60, metadata=right)).engine
        with pytest.raises(grpc.aio.AioRpcError):
            pause = srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)
            await stubs_for(channel).control.Pause(pause, timeout=60)


@pytest.mark.asyncio
async def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\n")
    config = ServerConfig(security=SecurityConfig(token_file=path))
    with pytest.raises(ValueError, match="is empty"):
        async with serve_in_process(fake(), config=config):
            pass


def self_signed(directory: Path) -> tuple[Path, Path]:
    key, certificate = directory / "key.pem", directory / "cert.pem"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    return key, certificate


@pytest.mark.asyncio
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_tls_with_a_certificate(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    config = ServerConfig(security=SecurityConfig(tls_certificate=certificate, tls_key=key))
    async with serve_in_process(fake(), config=config) as server:
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        options = (("grpc.ssl_target_name_override", "localhost"),)
        async with grpc.aio.secure_channel(server.address, credentials, options) as channel:
            assert await health_of(channel) == STATUS.SERVING
        async with channel_to(server.address) as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_of(plain)


class Dying(FakeEngine):
    """Breaks between calls."""

    def __init__(self) -> None:
        super().__init__(model=MODEL, clock=FakeClock())
        self.cause: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def wait_failed(self) -> Exception:
        return await asyncio.shield(self.cause)


@pytest.mark.asyncio
async def test_an_engine_that_dies_while_idle_takes_the_server_out_of_service() -> None:
    engine = Dying()
    async with serve_in_process(engine) as server, channel_to(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == STATUS.SERVING
        engine.cause.set_result(RuntimeError("a worker was killed"))
        assert (await watch.read()).status == STATUS.NOT_SERVING
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="RuntimeError: a worker was killed"):
            async for _ in stubs_for(channel).generation.Generate(want(), timeout=60):
                pass


@pytest.mark.asyncio
async def test_an_engine_that_dies_during_an_update_in_place_ends_it() -> None:
    engine = Dying()
    async with serve_in_process(engine) as server:
        updates = server.replica.updates
        spec = TensorSpec(name="a", element_type=ElementType.FLOAT32, shape=(1,))
        begin = Begin(
            update_id="u",
            weight_version=1,
            tensors=(spec,),
            lease_s=60.0,
            in_place=InFlightPolicy.DRAIN,
        )
        update = await updates.begin(begin)
        engine.cause.set_result(RuntimeError("a worker was killed"))
        with pytest.raises(UpdateUnknown):
            assert update.incoming.queue is not None
            update.incoming.queue.put(_tensor(spec))
            await update.incoming.queue.caught_up()
        with pytest.raises(EngineFailed):
            await updates.begin(replace(begin, update_id="v", in_place=None))
        assert server.replica.state is ServerState.FAILED


def _tensor(spec: TensorSpec) -> NamedTensor:
    return NamedTensor(spec=spec, data=memoryview(bytearray(spec.size_bytes)))
