"""Truncated sampling end to end: an engine, gRPC, agent loop, worker's encoding, training step."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    SingleTurnLoop,
)
from treadle.agent_loop.rpc import Requirements, connect
from treadle.agent_loop.testing import ByteRenderer
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backend import Rendezvous
from treadle.policy.backends import registry
from treadle.policy.client import sampling_masks
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import PolicyConfig
from treadle.policy.testing.tiny import write_model
from treadle.rollout_server.engine import ElementType
from treadle.rollout_server.engines.torch import ModelSource, TorchEngine
from treadle.rollout_server.sampling_mask import decode, encode
from treadle.rollout_server.testing import serve_in_process
from treadle.trainer.rollout.workers.trajectory_codec import read_trajectory, write_trajectory
from treadle.trainer.training_loop.groups import _sequence

CUTS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "whole": {},
}


@st.composite
def _kept(draw: st.DrawFn) -> tuple[list[int], int]:
    kept = sorted(draw(st.sets(st.integers(0, 40) | st.integers(0, 299), min_size=1)))
    return kept, draw(st.sampled_from(kept))


@settings(deadline=None)
@given(tokens=st.lists(_kept(), max_size=6))
def test_what_servers_encode_is_what_policies_decode(tokens: list[tuple[list[int], int]]) -> None:
    masks = [encode(kept, drawn, 300) for kept, drawn in tokens]
    found = sampling_masks.decode(masks, 300)
    assert not found.whole_T.any()
    for row, ((kept, drawn), mask) in enumerate(zip(tokens, masks, strict=True)):
        assert {*found.ids_N[found.rows_N == row].tolist(), drawn} == set(kept)
        assert decode(mask, drawn, 300) == set(kept)
        assert len(mask) <= 2 + kept[-1] // 8
    whole = encode(range(300), 7, 300)
    assert sampling_masks.decode([whole], 300).whole_T.tolist() == [True]
    assert len(decode(whole, 7, 300)) == 300


async def _sampled(address: str, sampling: SamplingParams) -> list[TrainSequence]:
    """Returns what a run would train on, with the trajectories as a loop worker sends them."""
    needs = Requirements(capabilities=frozenset({"sampled_logprobs", "sampling_mask"}))
    async with connect([address], requirements=needs) as generator:
        services = Services(
            generator=generator,
            renderer=ByteRenderer(),
            limits=LoopLimits(max_response_tokens=60, max_context_tokens=120),
            sampling=sampling,
        )
        tasks = [
            AgentTask(
                task_id="t",
                sample_index=0,
                rollout_index=number,
                loop="own",
                messages=(Message(role="user", content="2 + 2?"),),
                seed=number,
            )
            for number in range(6)
        ]
        loop = SingleTurnLoop()
        trajectories = await asyncio.gather(*[loop.run(task, services) for task in tasks])
    arrived = [read_trajectory(write_trajectory(t, t.task), t.task, {}) for t in trajectories]
    assert [t.samples for t in arrived] == [t.samples for t in trajectories]
    return [
        replace(_sequence(t.samples[0], None, 0, {}), advantages=float(number - 2))
        for number, t in enumerate(arrived)
    ]


@pytest.mark.asyncio
async def test_the_policy_has_the_distribution_that_was_sampled(tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=ByteRenderer.vocab_size)
    engine = await TorchEngine.load(
        ModelSource(path=tmp_path, dtype=ElementType.FLOAT32, device="cpu"),
        max_num_seqs=4,
        prefix_cache_bytes=1 << 20,
        num_threads=1,
    )
    batches: dict[str, list[TrainSequence]] = {}
    try:
        async with serve_in_process(engine) as server:
            for name, cut in CUTS.items():
                sampling = SamplingParams(
                    max_tokens=60, temperature=0.7, ignore_eos=True, sampling_mask=True, **cut
                )
                batches[name] = await _sampled(server.address, sampling)
    finally:
        await engine.aclose()
    loss = policy_loss(AlgorithmConfig())
    for backend in ("megatron", "fsdp"):
        policy = registry.build(
            PolicyConfig.model_validate({"backend": backend}),
            tmp_path,
            Rendezvous(),
            keep_reference=False,
            reference_path=None,
        )
        try:
            for name, batch in batches.items():
                found = policy.add_gradient(batch, loss, temperature=0.7)().metrics
                bare = [replace(sequence, sampling_masks=()) for sequence in batch]
                without = policy.add_gradient(bare, loss, temperature=0.7)().metrics
                assert found["rollout/logprob_diff_max"] <= 1e-5, (backend, name, found)
                assert (without["rollout/logprob_diff_max"] > 0.03) is (name != "whole")
        finally:
            policy.close()
