import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.policy.algorithms.advantages import Outcomes
from treadle.policy.algorithms.gae import gae, whitened_gae

numbers = st.floats(-3.0, 3.0, width=32)
sample = st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=8)
Sample = list[tuple[float, float, bool]]


def brute_force(tokens: Sample, gamma: float, lam: float) -> list[float]:
    """Equation 16 as a sum: of (gamma lam)^l delta over the sampled tokens that follow."""
    rewards = [r for r, _, sampled in tokens if sampled]
    values = [v for _, v, sampled in tokens if sampled]
    deltas = [
        r + gamma * following - v
        for r, v, following in zip(rewards, values, [*values[1:], 0.0], strict=False)
    ]
    advantages = iter(
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    )
    return [next(advantages) if sampled else 0.0 for _, _, sampled in tokens]


def flat(samples: list[Sample], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    tokens = [token for tokens in samples for token in tokens]
    advantages, returns = gae(
        np.array([r for r, _, _ in tokens]),
        np.array([v for _, v, _ in tokens]),
        np.array([sampled for _, _, sampled in tokens], bool),
        np.array([len(tokens) for tokens in samples], np.int64),
        gamma=gamma,
        lam=lam,
    )
    return advantages.tolist(), returns.tolist()


def test_observed_tokens_are_skipped() -> None:
    """verl's compute_gae_advantage_return gives [3.5, 1.5, 1.5], of which the second is masked."""
    advantages, returns = flat([[(1.0, 0.5, True), (2.0, 1.0, False), (3.0, 1.5, True)]], 1.0, 1.0)
    assert advantages == [3.5, 0.0, 1.5]
    assert returns == [4.0, 0.0, 3.0]


@settings(max_examples=50, deadline=None)
@given(
    samples=st.lists(sample, max_size=5),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
)
def test_many_samples_are_what_each_is_alone(
    samples: list[Sample], gamma: float, lam: float
) -> None:
    advantages, returns = flat(samples, gamma, lam)
    want = [a for tokens in samples for a in brute_force(tokens, gamma, lam)]
    tokens = [token for tokens in samples for token in tokens]
    assert advantages == pytest.approx(want, abs=1e-9)
    assert returns == pytest.approx(
        [a + v if sampled else 0.0 for a, (_, v, sampled) in zip(want, tokens, strict=True)],
        abs=1e-9,
    )


@settings(max_examples=50, deadline=None)
@given(
    trajectories=st.lists(
        st.tuples(numbers, st.lists(st.lists(numbers, max_size=4), max_size=3)), max_size=5
    ),
    lam=st.sampled_from([1.0, 0.9]),
)
def test_each_sample_ends_with_the_reward_of_its_trajectory(
    trajectories: list[tuple[float, list[list[float]]]], lam: float
) -> None:
    """Against the sum of equation 16, whitened by numpy over all sampled tokens."""
    samples = [
        [(reward if t == len(values) - 1 else 0.0, v, True) for t, v in enumerate(values)]
        for reward, of_trajectory in trajectories
        for values in of_trajectory
    ]
    outcomes = Outcomes.of(
        [reward for reward, _ in trajectories],
        list(range(len(trajectories))),
        tokens=[[len(values) for values in samples] for _, samples in trajectories],
        values=[v for tokens in samples for _, v, _ in tokens],
    )
    found = whitened_gae(outcomes, gamma=0.9, lam=lam)
    plain = np.array([a for tokens in samples for a in brute_force(tokens, 0.9, lam)])
    assert found.returns_T is not None
    assert outcomes.values_T is not None
    assert found.returns_T == pytest.approx(plain + outcomes.values_T, abs=1e-9)
    if len(plain) > 1 and plain.std() > 1e-3:
        white = (plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8)
        assert found.values_T == pytest.approx(white, abs=1e-6)


def test_without_values_there_is_no_gae() -> None:
    with pytest.raises(ValueError, match="gae needs the values of a critic"):
        whitened_gae(Outcomes.of([1.0], [0]), gamma=1.0, lam=1.0)


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="samples of 2 tokens have 1 rewards"):
        gae(
            np.zeros(1),
            np.zeros(1),
            np.ones(1, bool),
            np.array([2]),
            gamma=1.0,
            lam=1.0,
        )
