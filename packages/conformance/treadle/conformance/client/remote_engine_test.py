import asyncio

import grpc.aio
import pytest

from treadle.conformance.client.remote_engine import connect_engine
from treadle.conformance.contracts.reader import request, run_all
from treadle.rollout_server.config.schema import AdmissionConfig, ServerConfig
from treadle.rollout_server.engine import ModelInfo
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.testing import serve_in_process


@pytest.mark.asyncio
async def test_a_queue_that_is_full_only_costs_time() -> None:
    model = ModelInfo(architecture="x", vocab_size=9, context_length=64, eos_token_ids=frozenset())
    fake = FakeEngine(model=model, clock=asyncio.get_running_loop())
    config = ServerConfig(admission=AdmissionConfig(max_in_flight=1, max_queued=1))
    async with (
        serve_in_process(fake, config=config) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        connect_engine(channel) as engine,
    ):
        wanted = [request((1, 2, 3), max_tokens=2, seed=seed) for seed in range(6)]
        outputs = await run_all(engine, wanted)
    assert [len(output.token_ids) for output in outputs] == [2] * 6
