"""The losses of a service equal their formulas in plain torch, in value and gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from treadle.policy.algorithms.choose_loss import load_loss
from treadle.policy.backend import LossInputs
from treadle.policy.config.algorithm import AlgorithmConfig

LENGTHS = (3, 5)


def plain_gspo(p: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """The loss of each sample's own ratio, times its tokens' advantages."""
    losses = []
    for p_T, q_T, a_T in zip(p.split(LENGTHS), q.split(LENGTHS), a.split(LENGTHS), strict=True):
        # The gradient of a token is that of a mean over one, not of the sample's mean.
        s_T = (p_T - q_T).mean().exp().detach() * (p_T - p_T.detach()).exp()
        losses.append(-torch.minimum(s_T * a_T, s_T.clip(0.9, 1.1) * a_T))
    return torch.cat(losses)


PLAIN: dict[str, tuple[dict[str, float], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "weighted": ({}, lambda p, q, a: -p * a),
    "importance": ({}, lambda p, q, a: -(p.exp() / q.exp() * a)),
    "clipped": (
        {"low": 0.8, "high": 1.2},
        lambda p, q, a: -torch.min((p - q).exp() * a, (p - q).exp().clip(0.8, 1.2) * a),
    ),
    "cispo": (
        {"low": 0.8, "high": 1.2},
        lambda p, q, a: -((p - q).exp().clip(0.8, 1.2).detach() * p * a),
    ),
    "dro": ({"beta": 0.05}, lambda p, q, a: -(p * a - 0.5 * 0.05 * (p - q) ** 2)),
    "gspo": ({"low": 0.9, "high": 1.1}, plain_gspo),
}


@pytest.mark.parametrize("name", PLAIN)
def test_value_and_gradient_are_those_of_the_formula(name: str) -> None:
    arguments, formula = PLAIN[name]
    generator = torch.Generator().manual_seed(3)
    size = sum(LENGTHS)
    p = torch.empty(size).uniform_(-3, -0.1, generator=generator).requires_grad_()
    q = p.detach() + torch.empty(size).uniform_(-0.6, 0.6, generator=generator)
    a = torch.empty(size).uniform_(-2, 2, generator=generator)
    a[0] = 0.0
    loss = load_loss(
        AlgorithmConfig(
            loss=f"treadle.policy.algorithms.service_losses:{name}", loss_args=arguments
        )
    )
    assert not loss.zero_without_advantage  # every token's log-probability is wanted
    output = loss(
        LossInputs(
            logprobs_T=p,
            entropy_T=-p.detach(),
            advantages_T=a,
            old_logprobs_T=q,
            rollout_logprobs_T=q,
            ref_logprobs_T=None,
            stale_T=a > math.inf,
            sample_lengths_S=torch.tensor(LENGTHS),
        )
    ).loss_T
    (gradient,) = torch.autograd.grad(output.sum(), p)
    other = p.detach().clone().requires_grad_()
    want = formula(other, q, a)
    (want_gradient,) = torch.autograd.grad(want.sum(), other)
    torch.testing.assert_close(output, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=0, atol=1e-6)
