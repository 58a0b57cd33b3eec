from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.policy.config.policy import OptimizerConfig


def test_warm_up_then_constant() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [config.learning_rate(s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_end_at_min_lr_and_stay() -> None:
    linear = OptimizerConfig(lr=1.0, schedule="linear", decay_steps=4, min_lr=0.2)
    assert [linear.learning_rate(s) for s in range(6)] == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )
    cosine = OptimizerConfig(lr=1.0, schedule="cosine", decay_steps=4, min_lr=0.2)
    assert cosine.learning_rate(2) == pytest.approx(0.6)
    assert cosine.learning_rate(400) == pytest.approx(0.2)


@given(st.integers(0, 20), st.integers(1, 50), st.sampled_from(["linear", "cosine"]))
def test_the_rate_rises_to_lr_once_and_never_rises_again(
    warmup: int, decay: int, schedule: str
) -> None:
    config = OptimizerConfig.model_validate(
        {"lr": 1.0, "warmup_steps": warmup, "schedule": schedule, "decay_steps": warmup + decay}
    )
    rates = [config.learning_rate(step) for step in range(warmup + decay + 3)]
    assert rates[warmup] == 1.0
    assert all(a < b for a, b in pairwise(rates[:warmup]))
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert rates[-1] == pytest.approx(0.0)
