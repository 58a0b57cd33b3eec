"""Losses against the papers' equations, written once more in numpy, in double precision."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.policy.algorithms.losses import (
    Cispo,
    ClipCov,
    ClippedSurrogate,
    Distillation,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    NegativeLogLikelihood,
    PolicyGradient,
)
from treadle.policy.backend import LossFn, LossInputs

Array = NDArray[np.float64]


def batch(
    old: Array, new: Array, advantages: Array, lengths: list[int], ref: Array | None = None
) -> LossInputs:
    return LossInputs(
        logprobs_T=torch.tensor(new).requires_grad_(),
        entropy_T=torch.full((len(old),), 1.5, dtype=torch.float64),
        advantages_T=torch.tensor(advantages),
        old_logprobs_T=torch.tensor(old),
        rollout_logprobs_T=None,
        ref_logprobs_T=torch.tensor(old - 0.5 if ref is None else ref),
        stale_T=torch.zeros(len(old), dtype=torch.bool),
        sample_lengths_S=torch.tensor(lengths),
        selected_T=torch.tensor([t % 3 == 1 for t in range(len(old))]),
    )


def one(ratio: float, advantage: float) -> LossInputs:
    old = np.array([-2.0])
    return batch(old, old + math.log(ratio), np.array([advantage]), [1])


def drawn(seed: int, lengths: list[int], *, spread: float = 0.4) -> LossInputs:
    draw = np.random.default_rng(seed)
    total = sum(lengths)
    old = -draw.exponential(1.0, total) - 0.01
    new = np.minimum(old + draw.normal(0.0, spread, total), -1e-3)
    of_sample = draw.normal(0.0, 1.0, len(lengths))
    return batch(old, new, np.repeat(of_sample, lengths), lengths, old - draw.normal(0, 1, total))


def gradient_of(loss: LossFn, inputs: LossInputs) -> Array:
    inputs = replace(inputs, logprobs_T=inputs.logprobs_T.detach().clone().requires_grad_())
    loss(inputs).loss_T.sum().backward()
    assert inputs.logprobs_T.grad is not None
    return inputs.logprobs_T.grad.numpy()


# --- the clipped surrogate, by hand ---------------------------------------------------------------


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
    output = ClippedSurrogate(clip_low=0.2, clip_high=0.28)(one(ratio, advantage))
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
    given_ = one(ratio, advantage)
    metrics = ClippedSurrogate()(given_).metrics_T
    stopped = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
    want = 0.0 if stopped.item() else -advantage * ratio
    assert gradient_of(ClippedSurrogate(), given_)[0] == pytest.approx(want, abs=1e-12)


def test_without_dual_clip_the_loss_grows_with_the_ratio() -> None:
    output = ClippedSurrogate(clip_dual=None)(one(9.0, -2.0))
    assert output.loss_T.item() == pytest.approx(18.0)
    assert "actor/pg_clipfrac_lower" not in output.metrics_T


# --- the others, from their papers ----------------------------------------------------------------

LOW, HIGH = 0.1, 0.25


def gspo(x: dict[str, Array], samples: list[slice]) -> tuple[Array, Array]:
    loss, gradient = np.zeros_like(x["new"]), np.zeros_like(x["new"])
    for s in samples:
        ratio = math.exp(float(np.mean(x["new"][s] - x["old"][s])))
        for t in range(s.start, s.stop):
            a = x["A"][t]
            kept = min(ratio * a, min(max(ratio, 1 - LOW), 1 + HIGH) * a)
            loss[t] = -kept
            gradient[t] = -a * ratio if kept == ratio * a else 0.0
    return loss, gradient


def gmpo(x: dict[str, Array], samples: list[slice]) -> tuple[Array, Array]:
    """The gradient is that of a sample's objective, times its length: by finite differences."""

    def of_sample(new: Array, s: slice) -> float:
        d, a = new - x["old"][s], x["A"][s][0]
        clipped = np.clip(d, -LOW, HIGH)
        kept = np.minimum(d, clipped) if a > 0 else np.maximum(d, clipped)
        return float(-a * math.exp(float(np.mean(kept))))

    loss, gradient = np.zeros_like(x["new"]), np.zeros_like(x["new"])
    for s in samples:
        loss[s] = of_sample(x["new"][s], s)
        for t in range(s.stop - s.start):
            step = np.zeros(s.stop - s.start)
            step[t] = 1e-6
            up, down = of_sample(x["new"][s] + step, s), of_sample(x["new"][s] - step, s)
            gradient[s.start + t] = (up - down) / 2e-6 * (s.stop - s.start)
    return loss, gradient


def cispo(x: dict[str, Array], samples: list[slice]) -> tuple[Array, Array]:
    weight = np.clip(np.exp(x["new"] - x["old"]), 1 - LOW, 1 + HIGH)
    return -weight * x["A"] * x["new"], -weight * x["A"]


def policy_gradient(x: dict[str, Array], samples: list[slice]) -> tuple[Array, Array]:
    return -x["A"] * x["new"], -x["A"]


def dppo_tv(x: dict[str, Array], samples: list[slice]) -> tuple[Array, Array]:
    moved = np.exp(x["new"]) - np.exp(x["old"])
    keep = np.where(x["A"] > 0, moved <= HIGH, moved >= -LOW)
    weight = np.minimum(np.exp(x["new"] - x["old"]), 1.5) * keep
    return -weight * x["A"] * x["new"], -weight * x["A"]


def dppo_kl(x: dict[str, Array], samples: list[slice]) -> tuple[Array, Array]:
    p, q = np.exp(x["new"]), np.exp(x["old"])
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    away = np.where(x["A"] > 0, p > q, p < q)
    keep = ~(away & (kl > np.where(x["A"] > 0, HIGH, LOW)))
    weight = np.minimum(p / q, 1.5) * keep
    return -weight * x["A"] * x["new"], -weight * x["A"]


def clip_cov(x: dict[str, Array], samples: list[slice]) -> tuple[Array, Array]:
    ratio = np.exp(x["new"] - x["old"])
    objective = np.minimum(ratio * x["A"], np.clip(ratio, 1 - LOW, 1 + HIGH) * x["A"])
    unclipped = objective == ratio * x["A"]
    kept = x["selected"] == 0
    return -objective * kept, -ratio * x["A"] * unclipped * kept


def kl_cov(x: dict[str, Array], samples: list[slice]) -> tuple[Array, Array]:
    d = x["new"] - x["old"]
    chosen = x["selected"] == 1
    loss = -np.exp(d) * x["A"] + np.where(chosen, 0.7 * np.abs(d), 0.0)
    return loss, -np.exp(d) * x["A"] + np.where(chosen, 0.7 * np.sign(d), 0.0)


def distillation(x: dict[str, Array], samples: list[slice]) -> tuple[Array, Array]:
    ratio, a = np.exp(x["new"] - x["old"]), x["ref"] - x["new"]
    objective = np.minimum(ratio * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a)
    return -objective, -ratio * a * (objective == ratio * a)


Equation = Callable[[dict[str, Array], list[slice]], tuple[Array, Array]]
CASES: list[tuple[Any, Equation]] = [
    (PolicyGradient(), policy_gradient),
    (Gspo(clip_low=LOW, clip_high=HIGH), gspo),
    (Gmpo(clip_low=LOW, clip_high=HIGH), gmpo),
    (Cispo(clip_low=LOW, clip_high=HIGH), cispo),
    (Dppo(divergence="tv", clip_low=LOW, clip_high=HIGH, clip_dual=1.5), dppo_tv),
    (Dppo(divergence="kl", clip_low=LOW, clip_high=HIGH, clip_dual=1.5), dppo_kl),
    (ClipCov(clip_low=LOW, clip_high=HIGH), clip_cov),
    (KlCov(coef=0.7), kl_cov),
    (Distillation(clip_low=LOW, clip_high=HIGH), distillation),
]
NAMES = [equation.__name__ for _, equation in CASES]
LENGTHS = [5, 1, 17, 2, 30]


@pytest.mark.parametrize(("loss", "equation"), CASES, ids=NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_equation(
    loss: LossFn, equation: Equation, seed: int
) -> None:
    inputs = drawn(seed, LENGTHS)
    assert inputs.ref_logprobs_T is not None and inputs.selected_T is not None
    x = {
        "new": inputs.logprobs_T.detach().numpy(),
        "old": inputs.old_logprobs_T.numpy(),
        "A": inputs.advantages_T.numpy(),
        "ref": inputs.ref_logprobs_T.numpy(),
        "selected": inputs.selected_T.numpy().astype(np.float64),
    }
    stops = np.cumsum(LENGTHS).tolist()
    want_loss, want_gradient = equation(
        x, [slice(stop - n, stop) for stop, n in zip(stops, LENGTHS, strict=True)]
    )
    assert loss(inputs).loss_T.detach().numpy() == pytest.approx(want_loss, abs=1e-7)
    assert gradient_of(loss, inputs) == pytest.approx(want_gradient, abs=1e-5)


EVERY = [ClippedSurrogate(), *(loss for loss, _ in CASES)]
IDS = ["ppo", *NAMES]


@pytest.mark.parametrize("loss", EVERY[:-1], ids=IDS[:-1])
def test_the_first_update_is_the_policy_gradient(loss: LossFn) -> None:
    inputs = drawn(7, LENGTHS)
    inputs = replace(inputs, old_logprobs_T=inputs.logprobs_T.detach())
    if isinstance(loss, ClipCov):
        inputs = replace(inputs, selected_T=torch.zeros_like(inputs.stale_T))
    assert gradient_of(loss, inputs) == pytest.approx(-inputs.advantages_T.numpy(), abs=1e-9)


def test_the_gradient_of_distillation_is_that_of_the_reverse_kl() -> None:
    """Of a distribution over 6 tokens, summed over all of them with their probabilities."""
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    teacher = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    teacher = teacher.log_softmax(0)
    exact, sampled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    p = exact.log_softmax(0)
    (p.exp() * (p - teacher)).sum().backward()
    logprobs = sampled.log_softmax(0)
    inputs = replace(
        drawn(0, [6]),
        logprobs_T=logprobs,
        old_logprobs_T=logprobs.detach(),
        ref_logprobs_T=teacher,
    )
    output = Distillation(clip_low=0.2, clip_high=0.2)(inputs)
    (output.loss_T * logprobs.detach().exp()).sum().backward()
    assert sampled.grad is not None and exact.grad is not None
    assert sampled.grad.numpy() == pytest.approx(exact.grad.numpy(), abs=1e-12)


@given(
    seed=st.integers(0, 100),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    number=st.integers(0, len(EVERY) - 1),
    data=st.data(),
)
def test_neither_order_nor_micro_batches_change_a_token(
    seed: int, lengths: list[int], number: int, data: st.DataObject
) -> None:
    loss, inputs = EVERY[number], drawn(seed, lengths, spread=0.2)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    whole = torch.split(loss(inputs).loss_T, lengths)
    for part in (order[:cut], order[cut:]):
        if not part:
            continue
        tokens = torch.cat([torch.split(torch.arange(sum(lengths)), lengths)[i] for i in part])
        some = replace(
            inputs,
            **{
                name: getattr(inputs, name)[tokens]
                for name in (
                    *("logprobs_T", "entropy_T", "advantages_T", "old_logprobs_T"),
                    *("ref_logprobs_T", "stale_T", "selected_T"),
                )
            },
            sample_lengths_S=torch.tensor([lengths[i] for i in part]),
        )
        want = torch.cat([whole[i] for i in part])
        assert loss(some).loss_T.detach().numpy() == pytest.approx(want.detach().numpy(), abs=1e-12)


@pytest.mark.parametrize("loss", EVERY, ids=IDS)
def test_a_batch_without_tokens_has_the_same_metrics(loss: LossFn) -> None:
    inputs = drawn(0, [3])
    empty = replace(
        inputs,
        logprobs_T=torch.zeros(0),
        advantages_T=torch.zeros(0),
        old_logprobs_T=torch.zeros(0),
        ref_logprobs_T=torch.zeros(0),
        selected_T=torch.zeros(0, dtype=torch.bool),
        sample_lengths_S=torch.zeros(0, dtype=torch.int64),
    )
    assert loss(empty).metrics_T.keys() == loss(inputs).metrics_T.keys()


def test_what_a_loss_reads_must_be_there() -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        Distillation(clip_low=0.2, clip_high=0.2)(replace(one(1.0, 1.0), ref_logprobs_T=None))
    with pytest.raises(ValueError, match="selected"):
        KlCov(coef=1.0)(replace(one(1.0, 1.0), selected_T=None))


def test_supervised_loss_is_the_negative_log_likelihood() -> None:
    given_ = one(1.0, 0.0)
    assert NegativeLogLikelihood()(given_).loss_T.tolist() == [2.0]
    assert not NegativeLogLikelihood().zero_without_advantage
