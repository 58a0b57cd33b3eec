"""Health of a server whose engine breaks while nobody calls it, as probes and Prometheus see it."""

import asyncio
import urllib.request

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import ModelInfo
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.testing import serve_in_process

MODEL = ModelInfo(architecture="x", vocab_size=9, context_length=64, eos_token_ids=frozenset())
STATUS = health_pb2.HealthCheckResponse


class Mortal(FakeEngine):
    """Breaks when the test says so."""

    def __init__(self) -> None:
        super().__init__(model=MODEL, clock=asyncio.get_running_loop())
        self.death: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def wait_failed(self) -> Exception:
        return await self.death


@pytest.mark.asyncio
async def test_an_idle_engine_that_dies_takes_its_server_out_of_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Mortal()
    async with (
        serve_in_process(engine, config=ServerConfig(metrics_address="127.0.0.1:0")) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        seen = []
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for update in watch:
            seen.append(update.status)
            if update.status == STATUS.NOT_SERVING:
                break
            engine.death.set_result(RuntimeError("worker 1 is gone"))
        watch.cancel()
        url = f"http://{server.metrics_address}/metrics"
        text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    assert seen == [STATUS.SERVING, STATUS.NOT_SERVING]
    assert 'treadle_server_state{state="failed"} 1.0' in text
    assert "worker 1 is gone" in caplog.text
