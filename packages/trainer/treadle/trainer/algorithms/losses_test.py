import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.trainer.algorithms.losses import (
    ClippedSurrogate,
    NegativeLogLikelihood,
    policy_loss,
)
from treadle.trainer.config.algorithm import AlgorithmConfig
from treadle.trainer.policy.backend import LossInputs


def inputs(ratio: float, advantage: float) -> LossInputs:
    old = torch.tensor([-2.0], dtype=torch.float64)
    return LossInputs(
        logprobs_T=(old + math.log(ratio)).requires_grad_(),
        entropy_T=torch.tensor([1.5], dtype=torch.float64),
        advantages_T=torch.tensor([advantage], dtype=torch.float64),
        old_logprobs_T=old,
        rollout_logprobs_T=None,
        ref_logprobs_T=torch.tensor([-2.5], dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "want", "clipped", "bounded"),
    [
        (1.0, 2.0, -2.0, 0.0, 0.0),  # on-policy
        (1.1, 2.0, -2.2, 0.0, 0.0),  # inside the clip range
        (1.5, 2.0, -2.56, 1.0, 0.0),  # clipped at 1 + high = 1.28
        (0.5, 2.0, -1.0, 0.0, 0.0),  # a loss that got worse is not clipped
        (0.5, -2.0, 1.6, 1.0, 0.0),  # clipped at 1 - low = 0.8
        (1.5, -2.0, 3.0, 0.0, 0.0),
        (9.0, -2.0, 6.0, 0.0, 1.0),  # dual clip: at most 3 |A|
    ],
)
def test_each_branch_of_the_surrogate(
    ratio: float, advantage: float, want: float, clipped: float, bounded: float
) -> None:
    output = ClippedSurrogate(clip_low=0.2, clip_high=0.28)(inputs(ratio, advantage))
    assert output.loss_T.item() == pytest.approx(want)
    metrics = {name: value.item() for name, value in output.metrics_T.items()}
    assert metrics == pytest.approx(
        {
            "actor/pg_clipfrac": clipped,
            "actor/pg_clipfrac_lower": bounded,
            "actor/ppo_kl": -math.log(ratio),
            "actor/pg_loss": want,
        }
    )


@given(st.floats(0.01, 100.0), st.floats(-5.0, 5.0))
def test_a_clipped_token_has_no_gradient_and_another_the_policy_gradient(
    ratio: float, advantage: float
) -> None:
    given_ = inputs(ratio, advantage)
    output = ClippedSurrogate()(given_)
    output.loss_T.sum().backward()  # type: ignore[no-untyped-call]
    gradient = given_.logprobs_T.grad
    assert gradient is not None
    stopped = output.metrics_T["actor/pg_clipfrac"] + output.metrics_T["actor/pg_clipfrac_lower"]
    want = 0.0 if stopped.item() else -advantage * ratio
    assert gradient.item() == pytest.approx(want, abs=1e-12)


def test_without_dual_clip_the_loss_grows_with_the_ratio() -> None:
    output = ClippedSurrogate(clip_dual=None)(inputs(9.0, -2.0))
    assert output.loss_T.item() == pytest.approx(18.0)
    assert "actor/pg_clipfrac_lower" not in output.metrics_T


def test_kl_and_entropy_are_added() -> None:
    loss = ClippedSurrogate(kl_coef=0.1, kl_type="k2", entropy_coef=0.01)
    output = loss(inputs(1.0, 2.0))
    assert output.loss_T.item() == pytest.approx(-2.0 + 0.1 * 0.125 - 0.01 * 1.5)
    assert not loss.zero_without_advantage


def test_kl_without_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        ClippedSurrogate(kl_coef=0.1)(replace(inputs(1.0, 1.0), ref_logprobs_T=None))


def test_the_settings_become_the_loss() -> None:
    config = AlgorithmConfig(clip_high=0.28, clip_dual=10.0, entropy_coef=0.5)
    loss = policy_loss(config)
    assert loss == ClippedSurrogate(clip_high=0.28, clip_dual=10.0, entropy_coef=0.5)
    assert policy_loss(AlgorithmConfig()).zero_without_advantage


def test_supervised_loss_is_the_negative_log_likelihood() -> None:
    given_ = inputs(1.0, 0.0)
    assert NegativeLogLikelihood()(given_).loss_T.tolist() == [2.0]
    assert not NegativeLogLikelihood().zero_without_advantage
