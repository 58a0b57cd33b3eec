import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.policy.algorithms.reward_kl import (
    COEFFICIENT,
    NUM_SEQUENCES,
    PENALTY,
    Charges,
    coefficient_after,
)
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import RewardKlConfig

ADAPTIVE = RewardKlConfig(coef=0.2, control="adaptive", target=0.05, horizon=1000.0)


def after(kl: float, coefficient: float = 0.2, sequences: float = 100.0) -> float:
    metrics = {PENALTY: kl, COEFFICIENT: coefficient, NUM_SEQUENCES: sequences}
    return coefficient_after(ADAPTIVE, metrics)


@pytest.mark.parametrize(
    ("kl", "want"),
    [
        (0.05, 0.2),
        (0.055, 0.2 * (1 + 0.1 * 0.1)),
        (0.045, 0.2 * (1 - 0.1 * 0.1)),
        (5.0, 0.2 * (1 + 0.2 * 0.1)),
        (-5.0, 0.2 * (1 - 0.2 * 0.1)),
    ],
)
def test_the_coefficient_follows_the_error_which_is_cut(kl: float, want: float) -> None:
    """Ziegler et al., section 2.2: e = clip(KL / target - 1, -0.2, 0.2), beta (1 + K e)."""
    assert after(kl) == pytest.approx(want, rel=1e-12)


def test_the_first_step_and_a_fixed_coefficient_are_as_configured() -> None:
    assert coefficient_after(ADAPTIVE, {}) == 0.2
    fixed = RewardKlConfig(coef=0.3, target=0.05)
    assert coefficient_after(fixed, {PENALTY: 9.0, COEFFICIENT: 0.1, NUM_SEQUENCES: 8.0}) == 0.3


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=6))
def test_a_run_that_resumes_after_any_step_has_the_same_coefficients(kls: list[float]) -> None:
    """A checkpoint keeps the metrics as JSON, which holds every float exactly."""
    coefficient = restored = ADAPTIVE.coef
    for kl in kls:
        metrics = {PENALTY: kl, COEFFICIENT: coefficient, NUM_SEQUENCES: 17.0}
        coefficient = coefficient_after(ADAPTIVE, metrics)
        restored = coefficient_after(ADAPTIVE, json.loads(json.dumps(metrics)))
        assert restored == coefficient


def test_sequences_count_alike_and_observed_tokens_not_at_all() -> None:
    def sequence(mask: tuple[bool, ...]) -> TrainSequence:
        return TrainSequence(ids=(1,) * len(mask), loss_mask=mask, advantages=0.0)

    long, short = sequence((False, True, False, True)), sequence((False, True))
    charges = Charges.of([long, short], [(9.0, 1.0, 9.0, 2.0), (9.0, 5.0)], 0.5)
    assert charges.metrics == {PENALTY: (1.5 + 5.0) / 2, COEFFICIENT: 0.5}
    assert charges.of_tokens is not None
    assert [each.tolist() for each in charges.of_tokens] == [[4.5, 0.5, 4.5, 1.0], [4.5, 2.5]]
