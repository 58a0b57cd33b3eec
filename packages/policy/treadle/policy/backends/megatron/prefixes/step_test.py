"""Shared prefixes in whole steps of the policy, against the same steps packed flat."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import FloatArray
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.client.types import SharePrefixes, StepStats, TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig
from treadle.policy.testing.tiny import forked_sequences, write_model

# With eps = 1 parameters compare as gradients do: see LINEAR in testing/contract_base.py.
LINEAR = OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0)
LOSS = policy_loss(AlgorithmConfig(entropy_coef=0.01))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen3"
    write_model(path, "qwen3", num_hidden_layers=2)
    return path


def run(
    folder: Path, batch: list[TrainSequence], mode: SharePrefixes, **settings: Any
) -> tuple[list[FloatArray], StepStats, dict[str, torch.Tensor]]:
    config = PolicyConfig(optimizer=LINEAR, share_prefixes=mode, **settings)
    policy = MegatronPolicy(config, folder)
    try:
        logprobs = policy.logprobs(batch, temperature=0.9)
        stats = policy.train_step(batch, LOSS, temperature=0.9)
        return logprobs, stats, {t.name: t.tensor.clone() for t in policy.export_weights()}
    finally:
        policy.close()


def assert_equal_up_to_rounding(got: Any, want: Any) -> None:
    for g, w in zip(got[0], want[0], strict=True):
        assert g == pytest.approx(w, abs=1e-5)
    assert got[1].loss == pytest.approx(want[1].loss, abs=1e-5)
    assert got[1].grad_norm == pytest.approx(want[1].grad_norm, rel=1e-5)
    assert got[1].metrics == pytest.approx(want[1].metrics, abs=1e-5)
    assert got[1].num_tokens == want[1].num_tokens == want[1].num_rows
    # A difference of parameters is one of gradients, times 0.05.
    assert max(float((got[2][n] - want[2][n]).abs().max()) for n in want[2]) < 5e-7


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32), micro_batch_tokens=st.sampled_from([2, 90, 8192]))
def test_a_step_equals_the_flat_one(folder: Path, seed: int, micro_batch_tokens: int) -> None:
    batch = forked_sequences(seed=seed)
    sizes = {"micro_batch_tokens": micro_batch_tokens}
    want = run(folder, batch, "never", **sizes)
    got = run(folder, batch, "always", **sizes)
    assert_equal_up_to_rounding(got, want)
    assert micro_batch_tokens == 2 or got[1].num_rows < want[1].num_rows


def test_recomputing_bfloat16_and_a_second_run(folder: Path) -> None:
    batch = forked_sequences()
    once, again, recomputed, coarse = (
        run(folder, order, "always", **settings)
        for order, settings in (
            (batch, {}),
            (batch, {}),
            (batch, {"recompute": "full", "logits_chunk_tokens": 7}),
            (batch, {"dtype": "bfloat16"}),
        )
    )
    assert once[0] == again[0]
    assert all(torch.equal(once[2][name], again[2][name]) for name in once[2])
    assert max(float((recomputed[2][n] - once[2][n]).abs().max()) for n in once[2]) < 5e-7
    for c, o in zip(coarse[0], once[0], strict=True):
        assert c == pytest.approx(o, abs=0.2)


def test_what_one_sample_learns_does_not_reach_its_sisters(folder: Path) -> None:
    """A sample's log-probabilities are those that it has alone, bit for bit or nearly."""
    batch = forked_sequences()
    together = run(folder, batch, "always")[0]
    for sequence, logprobs in random.Random(0).sample(list(zip(batch, together, strict=True)), 3):
        (alone,) = run(folder, [sequence], "always")[0]
        assert logprobs == pytest.approx(alone, abs=1e-5)
