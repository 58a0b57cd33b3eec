"""The filters of the reference, by numbers that can be checked by hand."""

import math

import pytest
import torch

from treadle.conformance.contracts.reference import distribution
from treadle.rollout_server.engine import Sampling

LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("sampling", "probabilities"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        # The nucleus is the fewest ids that reach top_p.
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        # What top_k leaves is what top_p counts from: 4/9 does not reach 0.45.
        ({"top_k": 3, "top_p": 0.45}, [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_filters(sampling: dict[str, float], probabilities: list[float]) -> None:
    found = distribution(LOGITS, (), Sampling(max_tokens=1, **sampling))  # type: ignore[arg-type]
    assert found.exp().tolist() == pytest.approx(probabilities)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, [True, True, False, False]),
        ({"top_p": 0.65}, [True, True, False, False]),
        ({"min_p": 0.6}, [True, True, False, False]),
        # 0.2 is below 0.51 of 0.4, by 2 percent.
        ({"min_p": 0.51}, [True, True, True, False]),
        # What two ids reach, 0.7, may be taken for less than 0.65, and 0.9 may not.
        ({"top_p": 0.65, "slack": 0.1}, [True, True, True, False]),
        ({"top_k": 2, "slack": 0.42}, [True, True, True, False]),
    ],
)
def test_slack_keeps_what_is_at_the_edge(sampling: dict[str, float], kept: list[bool]) -> None:
    given = {"slack": 0.03, **sampling}
    slack = given.pop("slack")
    found = distribution(LOGITS, (), Sampling(max_tokens=1, **given), slack)  # type: ignore[arg-type]
    assert found.isfinite().tolist() == kept


def test_a_penalty_makes_what_was_seen_less_likely_whatever_its_sign() -> None:
    logits = torch.tensor([2.0, -2.0, 0.5], dtype=torch.float64)
    sampling = Sampling(max_tokens=1, repetition_penalty=2.0)
    found = distribution(logits, (0, 1, 1), sampling)
    total = math.exp(1.0) + math.exp(-4.0) + math.exp(0.5)
    assert found.exp().tolist() == pytest.approx([math.exp(x) / total for x in (1.0, -4.0, 0.5)])
