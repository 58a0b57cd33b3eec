"""The correction against its formulas, by hand and in numpy."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.algorithms.correction import correction_weights
from treadle.policy.backend import LossInputs
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.correction import CRITERIA, CorrectionConfig

RATIOS = [0.5, 2.0, 4.0, 1.0, 0.25]  # two samples, of 3 tokens and of 2


def inputs_of(ratios: list[float], lengths: list[int]) -> LossInputs:
    total = len(ratios)
    rollout = torch.full((total,), -3.0, dtype=torch.float64)
    old = rollout + torch.tensor(ratios, dtype=torch.float64).log()
    return LossInputs(
        logprobs_T=(old + 0.1).requires_grad_(),
        entropy_T=torch.zeros(total),
        advantages_T=torch.linspace(-1.0, 1.0, total, dtype=torch.float64),
        old_logprobs_T=old,
        rollout_logprobs_T=rollout,
        ref_logprobs_T=None,
        stale_T=torch.tensor([t % 2 == 0 for t in range(total)]),
        sample_lengths_S=torch.tensor(lengths),
    )


INPUTS = inputs_of(RATIOS, [3, 2])


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"weights": "token"}, [0.5, 2.0, 2.0, 1.0, 0.25]),
        ({"weights": "token", "low": 0.5}, [0.5, 2.0, 2.0, 1.0, 0.5]),
        ({"weights": "token", "low": 0.4, "outside": "mask"}, [0.5, 2.0, 0.0, 1.0, 0.0]),
        ({"weights": "sample", "high": 5.0}, [4.0, 4.0, 4.0, 0.25, 0.25]),
        ({"weights": "sample", "outside": "mask"}, [0.0, 0.0, 0.0, 0.25, 0.25]),
        ({"weights": "token", "tokens": "stale"}, [0.5, 1.0, 2.0, 1.0, 0.25]),
        ({"reject": {"token_k1": (0.4, 2.5)}}, [1.0, 1.0, 0.0, 1.0, 0.0]),
        ({"reject": {"token_k2": 0.5 * math.log(3) ** 2}}, [1.0, 1.0, 0.0, 1.0, 0.0]),
        ({"reject": {"token_k3": 0.5}}, [1.0, 1.0, 0.0, 1.0, 0.0]),  # w - 1 - log w = 1.6, 0.64
        ({"reject": {"sample_sum_k1": (0.2, 3.9)}}, [0.0, 0.0, 0.0, 1.0, 1.0]),
        ({"reject": {"sample_mean_k1": (0.6, 1.5)}}, [0.0, 0.0, 0.0, 0.0, 0.0]),  # 1.59 and 0.5
        ({"reject": {"sample_mean_k1": (0.6, 1.6)}}, [1.0, 1.0, 1.0, 0.0, 0.0]),
        ({"reject": {"sample_max_k3": 1.0}}, [0.0, 0.0, 0.0, 1.0, 1.0]),
        ({"veto": 0.3}, [1.0, 1.0, 1.0, 0.0, 0.0]),
        ({"weights": "token", "veto": 0.3}, [0.5, 2.0, 2.0, 0.0, 0.0]),
        ({"veto": 0.3, "reject": {"sample_sum_k1": (0.2, 3.9)}}, [0.0] * 5),
    ],
)
def test_weights_by_hand(settings: dict[str, Any], want: list[float]) -> None:
    weights_T, _ = correction_weights(INPUTS, CorrectionConfig(**settings))
    assert weights_T.tolist() == pytest.approx(want)


def test_metrics_say_what_was_cut() -> None:
    config = CorrectionConfig(weights="token", veto=0.3, reject={"token_k1": (0.4, 2.5)})
    _, metrics = correction_weights(INPUTS, config)
    assert {name: values.mean().item() for name, values in metrics.items()} == pytest.approx(
        {
            "correction/weight": (0.5 + 2 + 2 + 1 + 0.25) / 5,
            "correction/outside": 0.2,
            "correction/rejected": 0.6,
            "correction/rejected_token_k1": 0.4,
            "correction/rejected_veto": 0.4,
        }
    )


def test_the_loss_is_the_decoupled_objective() -> None:
    """AReaL (arXiv:2505.24298), equation 5: the clipped surrogate, times p_prox / p_behav."""
    config = AlgorithmConfig(correction=CorrectionConfig(weights="token", high=100.0))
    output = policy_loss(config)(INPUTS)
    new, old = INPUTS.logprobs_T.detach().numpy(), INPUTS.old_logprobs_T.numpy()
    a, r = INPUTS.advantages_T.numpy(), np.exp(new - old)
    objective = np.array(RATIOS) * np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)
    assert output.loss_T.detach().numpy() == pytest.approx(-objective)
    assert output.metrics_T["actor/pg_loss"].numpy() == pytest.approx(-objective)
    inputs = replace(INPUTS, logprobs_T=INPUTS.logprobs_T.detach().clone().requires_grad_())
    policy_loss(config)(inputs).loss_T.sum().backward()
    assert inputs.logprobs_T.grad is not None
    assert inputs.logprobs_T.grad.numpy() == pytest.approx(-np.array(RATIOS) * r * a)


def test_against_the_servers_own_probabilities_the_present_policy_counts() -> None:
    config = AlgorithmConfig(
        loss="policy_gradient",
        old_logprobs="rollout",
        correction=CorrectionConfig(weights="token", high=100.0),
    )
    assert INPUTS.rollout_logprobs_T is not None
    inputs = replace(INPUTS, old_logprobs_T=INPUTS.rollout_logprobs_T)
    weights = policy_loss(config)(inputs).metrics_T["correction/weight"]
    assert weights.numpy() == pytest.approx(np.array(RATIOS) * math.exp(0.1))


EVERYTHING = CorrectionConfig(
    weights="sample",
    low=0.5,
    outside="mask",
    reject={name: (0.5, 2.0) if name.endswith("k1") else (0.1,) for name in CRITERIA},
    veto=1e-4,
)


@pytest.mark.parametrize("weights", ["token", "sample"])
def test_where_engine_and_trainer_agree_nothing_changes(weights: str) -> None:
    inputs = inputs_of([1.0] * 5, [3, 2])
    config = EVERYTHING.model_copy(update={"weights": weights})
    want = policy_loss(AlgorithmConfig())(inputs).loss_T
    got = policy_loss(AlgorithmConfig(correction=config))(inputs).loss_T
    assert got.tolist() == want.tolist()  # bit for bit


@given(
    st.lists(st.lists(st.floats(0.3, 3.0), min_size=1, max_size=5), min_size=2, max_size=5),
    st.data(),
)
def test_a_sample_is_corrected_alone(samples: list[list[float]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(samples))))
    together = correction_weights(
        inputs_of([r for s in samples for r in s], [len(s) for s in samples]), EVERYTHING
    )[0]
    of_sample = torch.split(together, [len(s) for s in samples])
    for number in order:
        alone, _ = correction_weights(
            inputs_of(samples[number], [len(samples[number])]), EVERYTHING
        )
        assert alone.tolist() == pytest.approx(of_sample[number].tolist(), rel=1e-12)


def test_the_default_corrects_nothing() -> None:
    assert not CorrectionConfig().active
    assert "correction" not in str(policy_loss(AlgorithmConfig()))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reject": {"seq_mean_k1": (0.9, 1.1)}}, "no such criterion.*sample_mean_k1"),
        ({"reject": {"token_k1": 2.0}}, "bounds of the ratio around 1"),
        ({"reject": {"token_k1": (1.1, 2.0)}}, "bounds of the ratio around 1"),
        ({"reject": {"token_k3": (0.1, 2.0)}}, "one number above 0"),
        ({"reject": {"token_k3": 0.0}}, "one number above 0"),
    ],
)
def test_bounds_that_make_no_sense(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        CorrectionConfig(**settings)


def test_a_ratio_is_not_corrected_twice() -> None:
    with pytest.raises(ValidationError, match="corrects twice"):
        AlgorithmConfig(old_logprobs="rollout", correction=CorrectionConfig(weights="token"))


def test_sequences_that_no_engine_sampled_cannot_be_corrected() -> None:
    with pytest.raises(ValueError, match="rollout_logprobs"):
        correction_weights(replace(INPUTS, rollout_logprobs_T=None), CorrectionConfig(veto=0.1))
