import math

import pytest
import torch

from treadle.policy.algorithms.mismatch import mismatch_metrics


def test_gaps_are_summed_up_in_mean_percentile_maximum_and_divergence() -> None:
    gaps = torch.linspace(-1.0, 0.99, 200)
    metrics = mismatch_metrics(gaps)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.5, abs=1e-2)
    assert metrics["rollout/logprob_diff_p99"] == pytest.approx(0.99, abs=1e-6)
    assert metrics["rollout/logprob_diff_max"] == 1.0
    want = sum(math.exp(g) - 1.0 - g for g in gaps.tolist()) / 200
    assert metrics["rollout/kl"] == pytest.approx(want, rel=1e-5)


def test_one_token_is_its_own_percentile() -> None:
    metrics = mismatch_metrics(torch.tensor([-0.25]))
    assert metrics["rollout/logprob_diff_p99"] == metrics["rollout/logprob_diff_max"] == 0.25


def test_tokens_of_older_weights_are_told_apart() -> None:
    gaps, stale = torch.tensor([1e-6, -0.5, 2e-6, 0.5]), torch.tensor([False, True, False, True])
    metrics = mismatch_metrics(gaps, stale)
    assert metrics["rollout/stale_tokens"] == 0.5
    assert metrics["rollout/logprob_diff_max"] == 0.5
    assert metrics["rollout/logprob_diff_fresh_max"] == pytest.approx(2e-6)
    assert metrics["rollout/logprob_diff_fresh_mean"] == pytest.approx(1.5e-6)


def test_nothing_is_told_apart_where_all_tokens_are_alike() -> None:
    gaps = torch.tensor([0.1, 0.2])
    for stale, share in ((None, 0.0), ([False, False], 0.0), ([True, True], 1.0)):
        flags = None if stale is None else torch.tensor(stale)
        metrics = mismatch_metrics(gaps, flags)
        assert metrics["rollout/stale_tokens"] == share
        assert not any("fresh" in name for name in metrics)


def test_small_gaps_do_not_make_the_divergence_negative() -> None:
    gaps = torch.linspace(-1e-6, 1e-6, 101)
    assert mismatch_metrics(gaps)["rollout/kl"] == pytest.approx(
        float((gaps**2 / 2).mean()), rel=1e-3
    )
