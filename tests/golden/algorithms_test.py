"""Advantages and losses against checked-in numbers, which `formulas.py` made without Treadle."""

import json
import math
from typing import Any

import pytest
import torch
from golden.formulas import GOLDEN, golden

from treadle.policy.algorithms.advantages import Outcomes, PerToken
from treadle.policy.algorithms.choose_loss import BUILT_IN, policy_loss
from treadle.policy.algorithms.estimators import NAMED, find_estimator
from treadle.policy.algorithms.value_loss import value_loss
from treadle.policy.backend import LossInputs
from treadle.policy.client.batch import token_weights
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig

CASES: dict[str, Any] = json.loads(GOLDEN.read_text())
BATCH, STEP = CASES["batch"], CASES["step"]


def test_the_numbers_are_those_of_the_formulas() -> None:
    assert _near(CASES, golden())


def _near(got: Any, want: Any) -> bool:
    """Equal up to what another machine's exp and log may change in the last digits."""
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(_near(got[k], want[k]) for k in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(_near, got, want))
    if isinstance(want, float):
        return math.isclose(got, want, rel_tol=1e-7, abs_tol=1e-8)
    return bool(got == want)


@pytest.mark.parametrize("name", CASES["advantages"])
def test_advantages(name: str) -> None:
    case = CASES["advantages"][name]
    config = AlgorithmConfig(advantage=case["advantage"], **case["settings"])
    outcomes = Outcomes.of(
        STEP["rewards"],
        STEP["groups"],
        tokens=STEP["tokens"],
        greedy=STEP["greedy"],
        values=STEP["values"],
    )
    found = find_estimator(config)(outcomes)
    if isinstance(found, PerToken):
        tokens = found.values_T
    else:
        tokens = found[outcomes.trajectories_S].repeat(outcomes.tokens_S)
    assert tokens.tolist() == pytest.approx(case["of_tokens"], abs=1e-9)
    if "returns" in case:
        assert isinstance(found, PerToken) and found.returns_T is not None
        assert found.returns_T.tolist() == pytest.approx(case["returns"], abs=1e-9)


@pytest.mark.parametrize("name", CASES["losses"])
def test_losses(name: str) -> None:
    case = CASES["losses"][name]
    config = _config(case["settings"])
    new_T = _tensor("new").requires_grad_()
    output = policy_loss(config)(
        LossInputs(
            logprobs_T=new_T,
            entropy_T=_tensor("entropy"),
            advantages_T=_tensor("advantages"),
            old_logprobs_T=_tensor("old"),
            rollout_logprobs_T=_tensor("rollout"),
            ref_logprobs_T=_tensor("ref"),
            stale_T=torch.tensor(BATCH["stale"]),
            sample_lengths_S=torch.tensor(BATCH["lengths"]),
            selected_T=torch.tensor(BATCH["selected"]),
        )
    )
    lengths = BATCH["lengths"]
    sequences = [
        TrainSequence(ids=(0,) * (1 + n), loss_mask=(False, *(True,) * n), advantages=0.0)
        for n in lengths
    ]
    weights = token_weights(sequences, config.loss_aggregation, config.aggregation_length)
    weights_T = torch.tensor(weights).double().repeat_interleave(torch.tensor(lengths))
    loss = (output.loss_T * weights_T).sum()
    loss.backward()
    assert new_T.grad is not None
    assert output.loss_T.tolist() == pytest.approx(case["loss_of_tokens"], abs=1e-7)
    assert loss.item() == pytest.approx(case["loss"], rel=1e-6)
    assert new_T.grad.tolist() == pytest.approx(case["gradient"], abs=1e-7)


def test_the_loss_of_a_critic() -> None:
    case = CASES["critic"]
    values, old, returns = (
        torch.tensor(case[name], dtype=torch.float64)
        for name in ("values", "old_values", "returns")
    )
    loss_T, _ = value_loss(values, old, returns, clip=case["clip"])
    assert loss_T.tolist() == pytest.approx(case["loss_of_tokens"], abs=1e-9)


def test_no_estimator_and_no_loss_is_without_numbers() -> None:
    assert {case["advantage"] for case in CASES["advantages"].values()} == set(NAMED)
    assert {case["settings"]["loss"] for case in CASES["losses"].values()} == set(BUILT_IN)


def _tensor(name: str) -> torch.Tensor:
    return torch.tensor(BATCH[name], dtype=torch.float64)


def _config(given: dict[str, Any]) -> AlgorithmConfig:
    correction = {name: given[name] for name in ("weights", "low", "high", "reject", "veto")}
    return AlgorithmConfig.model_validate(
        {
            **{name: given[name] for name in ("loss", "clip_low", "clip_high", "clip_dual")},
            **{name: given[name] for name in ("kl_coef", "kl_type", "entropy_coef")},
            **{name: given[name] for name in ("loss_aggregation", "aggregation_length")},
            "cov": {"kl_coef": given["kl_coef_cov"]},
            "correction": {
                **correction,
                "outside": "truncate" if given["truncate"] else "mask",
                "tokens": "stale" if given["stale_only"] else "all",
            },
        }
    )
