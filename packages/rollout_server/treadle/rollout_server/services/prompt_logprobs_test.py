"""Log-probabilities of prompts, from the fake engine over real gRPC."""

import asyncio
import math

import grpc.aio
import pytest

from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout_server.engine import (
    EngineCapabilities,
    EngineInfo,
    ModelInfo,
    PromptLogprobs,
    Sampling,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.engines.fake.model import LEAST_LOGPROB, Prefix, logits, sample
from treadle.rollout_server.errors import CapabilityMissing, InvalidField
from treadle.rollout_server.services import event_message, generation
from treadle.rollout_server.services.codec import decode_generate
from treadle.rollout_server.services.event_message import split_report
from treadle.rollout_server.services.testing import want
from treadle.rollout_server.testing import serve_in_process

MODEL = ModelInfo(architecture="fake", vocab_size=64, context_length=4096)


def info(*, can: bool = True) -> EngineInfo:
    capabilities = EngineCapabilities(sampled_logprobs=True, prompt_logprobs=can)
    return EngineInfo(name="e", version="1", model=MODEL, capabilities=capabilities)


def test_they_are_refused_where_there_are_none() -> None:
    request = want(prompt_logprobs_from=1)
    assert decode_generate(request, info()).prompt_logprobs_from == 1
    assert decode_generate(want(), info()).prompt_logprobs_from is None
    with pytest.raises(CapabilityMissing, match="prompt_logprobs"):
        decode_generate(request, info(can=False))
    count = len(request.prompt_token_ids)
    for wrong in (0, count + 1):
        problem = f"prompt_logprobs_from is {wrong}, expected 1 to the prompt's {count}"
        with pytest.raises(InvalidField, match=problem):
            decode_generate(want(prompt_logprobs_from=wrong), info())


@pytest.mark.asyncio
@pytest.mark.parametrize("batched", [False, True])
async def test_a_report_that_no_message_may_hold_is_split(
    batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (event_message, generation):
        monkeypatch.setattr(module, "MAX_REPORT_BYTES", 100)
    prompt = [i % 64 for i in range(100)]
    engine = FakeEngine(model=MODEL, clock=asyncio.get_running_loop())
    request = gen.GenerateRequest(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=gen.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True),
        logprob_mode=gen.LOGPROB_MODE_NONE,
        prompt_logprobs_from=4,
        batched=batched,
    )
    async with (
        serve_in_process(engine) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stubs = stubs_for(channel)
        messages = [m async for m in stubs.generation.Generate(request, timeout=60)]
    reports = [m.prompt_logprobs for m in messages if m.HasField("prompt_logprobs")]
    assert [len(report.logprobs) for report in reports] == [25, 25, 25, 21]
    found = [logprob for report in reports for logprob in report.logprobs]
    assert found == pytest.approx([_logprob(prompt[:n], prompt[n]) for n in range(4, 100)])


def _logprob(before: list[int], token_id: int) -> float:
    """Returns the log-probability with which the engine would sample an id."""
    candidates = logits(Prefix(before), b"", 64)
    if token_id not in candidates:
        return LEAST_LOGPROB
    plain = Sampling(max_tokens=1)
    for seed in range(10_000):
        drawn, logprob = sample(candidates, plain, seen=set(), seed=seed, position=0)
        if drawn == token_id:
            return logprob
    raise AssertionError(f"id {token_id} is a candidate and was never drawn")


def test_parts_hold_every_value_in_order() -> None:
    values = tuple(-math.sqrt(i) for i in range(600_000))
    parts = list(split_report(PromptLogprobs(values, 3), 0))
    assert all(isinstance(p, PromptLogprobs) and p.weight_version == 3 for p in parts)
    assert len(parts) == 3
    joined = [v for p in parts if isinstance(p, PromptLogprobs) for v in p.logprobs]
    assert tuple(joined) == values
