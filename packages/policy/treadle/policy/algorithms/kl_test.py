import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.policy.algorithms.kl import kl_penalty
from treadle.policy.config.algorithm import KlType

KINDS: tuple[KlType, ...] = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
logprob = st.floats(-30.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("k1", -0.5),
        ("k2", 0.125),
        ("k3", math.exp(0.5) - 1 - 0.5),
        ("abs", 0.5),
        ("k1+", -0.5),
        ("k3+", math.exp(0.5) - 1 - 0.5),
        ("abs+", 0.5),
    ],
)
def test_known_values(kind: KlType, want: float) -> None:
    got = kl_penalty(torch.tensor([-1.5]), torch.tensor([-1.0]), kind)
    assert got.tolist() == pytest.approx([want])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_pay_nothing(kind: KlType) -> None:
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


def gradient_of(logits: torch.Tensor, ref: torch.Tensor, kind: KlType) -> list[float]:
    """Of the penalty as a loss, in expectation over the policy's own samples."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    expected = (logprobs.detach().exp() * kl_penalty(logprobs, ref, kind)).sum()
    return [float(g) for g in torch.autograd.grad(expected, logits)[0]]


def test_the_gradient_is_that_of_the_divergence_for_k2_and_with_a_plus() -> None:
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ref = torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ref = ref.log_softmax(0)
    p = logits.clone().requires_grad_()
    exact = (p.softmax(0) * (p.log_softmax(0) - ref)).sum()
    want = [float(g) for g in torch.autograd.grad(exact, p)[0]]
    for kind in ("k2", "k1+", "k3+", "abs+"):
        assert gradient_of(logits, ref, kind) == pytest.approx(want, abs=1e-12)
    assert gradient_of(logits, ref, "k1") == pytest.approx([0.0] * 5, abs=1e-12)
    assert gradient_of(logits, ref, "k3") != pytest.approx(want, abs=1e-3)
