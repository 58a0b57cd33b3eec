import math

import pytest
import torch

from treadle.trainer.megatron.stats import rollout_metrics


def test_gaps_are_summed_up_in_mean_percentile_maximum_and_divergence() -> None:
    gaps = torch.linspace(-1.0, 0.99, 200)
    metrics = rollout_metrics(gaps)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.5, abs=1e-2)
    assert metrics["rollout/logprob_diff_p99"] == pytest.approx(0.99, abs=1e-6)
    assert metrics["rollout/logprob_diff_max"] == 1.0
    want = sum(math.exp(g) - 1.0 - g for g in gaps.tolist()) / 200
    assert metrics["rollout/kl"] == pytest.approx(want, rel=1e-5)


def test_one_token_is_its_own_percentile() -> None:
    metrics = rollout_metrics(torch.tensor([-0.25]))
    assert metrics["rollout/logprob_diff_p99"] == metrics["rollout/logprob_diff_max"] == 0.25
