import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.trainer.algorithms.kl import kl_penalty

KINDS: tuple[Literal["k1", "k2", "k3"], ...] = ("k1", "k2", "k3")
logprob = st.floats(-30.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "want"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1 - 0.5)]
)
def test_known_values(kind: Literal["k1", "k2", "k3"], want: float) -> None:
    got = kl_penalty(torch.tensor([-1.5]), torch.tensor([-1.0]), kind)
    assert got.tolist() == pytest.approx([want])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_pay_nothing(kind: Literal["k1", "k2", "k3"]) -> None:
    same = torch.tensor([-0.1, -9.0])
    assert kl_penalty(same, same, kind).tolist() == [0.0, 0.0]


@given(logprob, logprob)
def test_k2_and_k3_are_never_negative_and_k3_is_bounded(p: float, ref: float) -> None:
    p_T, ref_T = torch.tensor([p], dtype=torch.float64), torch.tensor([ref], dtype=torch.float64)
    assert kl_penalty(p_T, ref_T, "k2").item() >= 0.0
    assert -1e-9 <= kl_penalty(p_T, ref_T, "k3").item() <= 10.0


def test_k1_and_k3_estimate_the_same_divergence() -> None:
    p, ref = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.5, 0.25, 0.25])
    exact = float((p * (p / ref).log()).sum())
    for kind in ("k1", "k3"):
        assert float((p * kl_penalty(p.log(), ref.log(), kind)).sum()) == pytest.approx(exact)
