from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import BoolArray
from treadle.policy.algorithms.token_selection import some_in_band, token_selector
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig, CovarianceConfig

LOGPROBS = [(0.0, -1.0, -2.0), (0.0, -3.0, 0.0)]
SEQUENCES = [
    TrainSequence(ids=(1, 2, 3), loss_mask=(False, True, True), advantages=(1.0, 1.0, 1.0)),
    TrainSequence(ids=(1, 2, 3), loss_mask=(False, True, False), advantages=(-2.0, -2.0, -2.0)),
]
# By hand: means are A = 0 and log p = -2, so the covariances are 1, 0 and (-2)(-1) = 2.


def selected(config: AlgorithmConfig, seed: int = 0) -> list[BoolArray | None]:
    select = token_selector(config)
    assert select is not None
    return [s.selected for s in select(SEQUENCES, LOGPROBS, seed)]


def test_kl_cov_takes_the_largest_covariances() -> None:
    def of(ratio: float) -> list[BoolArray | None]:
        return selected(AlgorithmConfig(loss="kl_cov", cov=CovarianceConfig(ratio=ratio)))

    assert of(0.0002) == [(False, False, False), (False, True, False)]
    assert of(0.67) == [(False, True, False), (False, True, False)]


def test_clip_cov_draws_from_the_band() -> None:
    def of(low: float, high: float) -> list[BoolArray | None]:
        cov = CovarianceConfig(ratio=1.0, clip_low=low, clip_high=high)
        return selected(AlgorithmConfig(loss="clip_cov", cov=cov))

    assert of(0.5, 1.5) == [(False, True, False), (False, False, False)]
    assert of(1.0, 2.0) == [(False, False, False), (False, False, False)]  # strictly inside
    assert of(0.5, 5.0) == [(False, True, False), (False, True, False)]


def test_what_is_clipped_anyway_is_not_drawn() -> None:
    config = AlgorithmConfig(loss="clip_cov", cov=CovarianceConfig(ratio=1.0, clip_low=0.5))
    select = token_selector(config)
    assert select is not None
    old = [(0.0, -1.5, -2.0), (0.0, -3.0, 0.0)]  # the first token's ratio is exp(0.5) > 1.2
    given_ = [
        TrainSequence(
            ids=s.ids, loss_mask=s.loss_mask, advantages=s.advantages, old_logprobs=logprobs
        )
        for s, logprobs in zip(SEQUENCES, old, strict=True)
    ]
    chosen = [s.selected for s in select(given_, LOGPROBS, 0)]
    assert chosen == [(False, False, False), (False, True, False)]


@given(st.integers(1, 300), st.floats(0.0002, 1.0), st.integers(0, 5))
def test_the_number_drawn_and_the_seed(length: int, ratio: float, seed: int) -> None:
    values = torch.tensor(np.random.default_rng(length).normal(0, 3, length))
    drawn = some_in_band(values, ratio, low=1.0, high=5.0, seed=seed)
    inside = int(((values > 1.0) & (values < 5.0)).sum())
    assert len(drawn) == len(set(drawn.tolist())) == min(inside, max(1, int(ratio * length)))
    assert all(1.0 < values[i] < 5.0 for i in drawn.tolist())
    again = some_in_band(values, ratio, low=1.0, high=5.0, seed=seed)
    assert drawn.tolist() == again.tolist()


def test_other_losses_select_nothing() -> None:
    assert token_selector(AlgorithmConfig()) is None


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_the_seed_is_the_only_chance(loss: str) -> None:
    config = AlgorithmConfig(loss=loss, cov=CovarianceConfig(ratio=0.34, clip_low=0.5))
    assert selected(config, 3) == selected(config, 3)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_one_advantage_for_all_tokens_is_each_of_them(loss: str) -> None:
    config = AlgorithmConfig(loss=loss, cov=CovarianceConfig(ratio=0.5, clip_low=-9, clip_high=9))
    select = token_selector(config)
    assert select is not None
    each = [s.advantages for s in SEQUENCES]
    one = [
        replace(s, advantages=s.advantages[0])
        for s in SEQUENCES
        if not isinstance(s.advantages, float)
    ]
    assert each == [(a, a, a) for a in (1.0, -2.0)]
    assert [s.selected for s in select(one, LOGPROBS, 4)] == selected(config, 4)
