"""Routed experts, from the fake engine over real gRPC."""

import asyncio

import grpc.aio
import pytest

from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout_server.engine import EngineCapabilities, EngineInfo, ModelInfo, Tokens
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.engines.fake.model import routed_experts
from treadle.rollout_server.errors import CapabilityMissing, InvalidField
from treadle.rollout_server.services import event_message, generation
from treadle.rollout_server.services.codec import decode_generate
from treadle.rollout_server.services.event_message import MAX_REPORT_BYTES, split_report
from treadle.rollout_server.services.testing import want
from treadle.rollout_server.testing import serve_in_process

WIDE = ModelInfo(
    architecture="fake",
    vocab_size=64,
    context_length=4096,
    num_moe_layers=64,
    num_experts=300,
    experts_per_token=8,
)
"""With rows of 1 KiB: two bytes for each id."""


def info(model: ModelInfo, *, routed: bool = True) -> EngineInfo:
    can = EngineCapabilities(sampled_logprobs=True, routed_experts=routed)
    return EngineInfo(name="e", version="1", model=model, capabilities=can)


def test_they_are_refused_where_there_are_none() -> None:
    request = want(routed_experts_from=0)
    assert decode_generate(request, info(WIDE)).routed_experts_from == 0
    assert decode_generate(want(), info(WIDE)).routed_experts_from is None
    with pytest.raises(CapabilityMissing, match="routed_experts"):
        decode_generate(request, info(WIDE, routed=False))
    beyond = len(request.prompt_token_ids) + 1
    with pytest.raises(InvalidField, match=f"routed_experts_from is {beyond}, expected at most"):
        decode_generate(want(routed_experts_from=beyond), info(WIDE))


@pytest.mark.asyncio
@pytest.mark.parametrize("batched", [False, True])
async def test_a_report_that_no_message_may_hold_is_split(
    batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (event_message, generation):
        monkeypatch.setattr(module, "MAX_REPORT_BYTES", 40_000)
    prompt = [i % 64 for i in range(100)]
    engine = FakeEngine(model=WIDE, clock=asyncio.get_running_loop())
    request = gen.GenerateRequest(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=gen.SamplingParams(max_tokens=40, ignore_eos=True),
        logprob_mode=gen.LOGPROB_MODE_SAMPLED,
        routed_experts_from=5,
        batched=batched,
    )
    async with (
        serve_in_process(engine) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stubs = stubs_for(channel)
        described = await stubs.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
        messages = [m async for m in stubs.generation.Generate(request, timeout=60)]
    assert described.capabilities.routed_experts
    model = described.model
    assert (model.num_moe_layers, model.num_experts, model.experts_per_token) == (64, 300, 8)
    assert max(message.ByteSize() for message in messages) < 41_000
    chunks = [c for m in messages for c in (*m.batch.tokens, *[m.tokens] * m.HasField("tokens"))]
    ids = [*prompt, *(i for c in chunks for i in c.token_ids)]
    assert len(ids) == 140
    assert b"".join(c.routed_experts for c in chunks) == routed_experts(ids[5:-1], WIDE)


def test_parts_are_whole_rows() -> None:
    rows = bytes(range(256)) * 12_000
    parts = list(split_report(Tokens((1,), (-1.0,), 3, rows), 768))
    assert all(isinstance(p, Tokens) and len(p.routed_experts) % 768 == 0 for p in parts)
    assert [p.token_ids for p in parts if isinstance(p, Tokens)] == [(), (), (1,)]
    assert b"".join(p.routed_experts for p in parts if isinstance(p, Tokens)) == rows


def test_parts_have_whole_tokens_with_their_masks() -> None:
    masks = (b"", *(bytes([n]) * (MAX_REPORT_BYTES // 2 - n) for n in range(4)), b"\7")
    rows, ids = bytes(2 * MAX_REPORT_BYTES), tuple(range(len(masks)))
    whole = Tokens(ids, tuple(map(float, ids)), 3, rows, masks)
    parts = [part for part in split_report(whole, 1) if isinstance(part, Tokens)]
    assert [part.token_ids for part in parts] == [(), (0, 1, 2), (3, 4, 5)]
    assert all(sum(map(len, part.sampling_masks)) <= MAX_REPORT_BYTES for part in parts)
    assert sum((part.logprobs for part in parts), ()) == whole.logprobs
    assert sum((part.sampling_masks for part in parts), ()) == masks
    assert b"".join(part.routed_experts for part in parts) == rows
