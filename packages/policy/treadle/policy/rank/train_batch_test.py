import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import BoolArray, FloatArray
from treadle.policy.backend import LossFn
from treadle.policy.client.batch import cut, of_loss_tokens
from treadle.policy.client.types import (
    LossAggregation,
    LossStats,
    OptimizerStats,
    TokenValues,
    TrainSequence,
)
from treadle.policy.config.algorithm import AlgorithmConfig, CovarianceConfig
from treadle.policy.config.policy import AdamSettings
from treadle.policy.rank.train_batch import measure_reference, run_update
from treadle.policy.testing.fake.backend import FakePolicy


class _Policy(FakePolicy):
    """Records its calls; its log-probabilities are -1, the reference's -2."""

    def __init__(self, *, weight: float = 1.0, logprob: float = -1.0) -> None:
        self.weight, self.logprob = weight, logprob
        self._step = 0
        self.trained: list[Sequence[TrainSequence]] = []
        self.temperatures: set[float] = set()

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        self.temperatures.add(temperature)
        return [FloatArray((self.logprob,) * len(sequence.ids)) for sequence in sequences]

    def reference_logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        self.temperatures.add(temperature)
        return [FloatArray((-2.0,) * len(sequence.ids)) for sequence in sequences]

    def add_gradient(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        aggregation: LossAggregation = "token-mean",
        aggregation_length: int | None = None,
        temperature: float = 1.0,
        keep_tokens: bool = False,
    ) -> Callable[[], LossStats]:
        self.temperatures.add(temperature)
        self.trained.append(sequences)
        number = len(self.trained)
        values_M = np.full(sum(s.num_loss_tokens for s in sequences), -10.0 * number, np.float32)
        stats = LossStats(
            loss=0.0,
            num_sequences=len(sequences),
            num_computed=len(sequences),
            num_tokens=0,
            num_rows=0,
            num_loss_tokens=0,
            num_micro_batches=1,
            time_s=0.0,
            tokens=TokenValues(logprobs_M=values_M, entropy_M=-values_M) if keep_tokens else None,
        )
        return lambda: stats

    def optimizer_step(self, settings: AdamSettings | None = None) -> OptimizerStats:
        return OptimizerStats(
            step=len(self.trained), grad_norm=0.0, skipped=False, learning_rate=0.0
        )

    def weights_are_finite(self) -> bool:
        return math.isfinite(self.weight)


_SEQUENCES = tuple(
    TrainSequence(
        ids=(1, 2), loss_mask=(False, True), rollout_logprobs=(0.0, -0.5), advantages=(n, n)
    )
    for n in (1.0, 2.0, 3.0)
)


def test_one_update_needs_no_log_probabilities_beforehand() -> None:
    policy = _Policy()
    stats = run_update(policy, _SEQUENCES, AlgorithmConfig(), temperature=1.0)
    assert policy.trained == [list(_SEQUENCES)]
    assert len(stats.steps) == 1


def test_several_updates_are_measured_against_the_policy_that_began() -> None:
    policy = _Policy()
    run_update(policy, _SEQUENCES, AlgorithmConfig(epochs=2, mini_batches=2), temperature=1.0)
    assert [len(part) for part in policy.trained] == [1, 2, 1, 2]
    assert all(s.old_logprobs == (-1.0, -1.0) for part in policy.trained for s in part)


def _floats(values: bytes) -> list[float]:
    return [*map(float, np.frombuffer(values, "<f4"))]


def test_the_values_of_tokens_are_those_of_the_first_step_that_trained_on_them() -> None:
    once = run_update(_Policy(), _SEQUENCES, AlgorithmConfig(), temperature=1.0).tokens
    assert _floats(once.logprobs) == [-10.0] * 3
    several = run_update(
        _Policy(), _SEQUENCES, AlgorithmConfig(epochs=2, mini_batches=2), temperature=1.0
    )
    assert _floats(several.tokens.logprobs) == [-1.0] * 3  # those before the first step
    assert _floats(several.tokens.entropy) == [10.0, 20.0, 20.0]


def test_the_whole_batch_is_compared_with_the_rollout_where_it_was_computed_anyway() -> None:
    old = replace(
        _SEQUENCES[0],
        stale=BoolArray((False, True)),
        rollout_logprobs=FloatArray((9.0, -3.0)),
    )
    stats = run_update(
        _Policy(), (*_SEQUENCES, old), AlgorithmConfig(mini_batches=2), temperature=1.0
    )
    assert stats.mismatch["rollout/logprob_diff_mean"] == 0.875  # three times 0.5, and 2
    assert stats.mismatch["rollout/stale_tokens"] == 0.25
    assert stats.mismatch["rollout/logprob_diff_fresh_max"] == 0.5
    alone = run_update(_Policy(), _SEQUENCES, AlgorithmConfig(), temperature=1.0)
    assert not alone.mismatch


def test_everything_is_measured_at_the_temperature_of_the_sampling() -> None:
    policy = _Policy()
    run_update(policy, _SEQUENCES, AlgorithmConfig(epochs=2, kl_coef=0.1), temperature=0.7)
    assert policy.temperatures == {0.7}


def test_the_ratio_may_be_taken_against_the_rollout() -> None:
    policy = _Policy()
    run_update(policy, _SEQUENCES, AlgorithmConfig(old_logprobs="rollout"), temperature=1.0)
    assert all(s.old_logprobs == (0.0, -0.5) for s in policy.trained[0])


def test_a_policy_that_is_not_finite_afterwards_is_told() -> None:
    def broken(policy: _Policy) -> str | None:
        stats = run_update(policy, _SEQUENCES, AlgorithmConfig(), temperature=1.0)
        return stats.broken if stats.HasField("broken") else None

    assert broken(_Policy()) is None
    assert broken(_Policy(weight=math.inf)) == "weights that are not finite"
    told = "weights with which log-probabilities are not finite"
    assert broken(_Policy(logprob=math.nan)) == told


def test_a_loss_of_covariances_gets_its_tokens_from_the_whole_mini_batch() -> None:
    policy = _Policy()
    config = AlgorithmConfig(loss="kl_cov", mini_batches=2, cov=CovarianceConfig(ratio=0.5))
    run_update(policy, _SEQUENCES, config, temperature=0.7)
    chosen = [[s.selected for s in part] for part in policy.trained]
    assert chosen == [[(False, True)], [(False, True), (False, False)]]
    assert policy.temperatures == {0.7}


def test_a_kl_term_gets_the_reference() -> None:
    policy = _Policy()
    run_update(policy, _SEQUENCES, AlgorithmConfig(kl_coef=0.1), temperature=1.0)
    assert all(s.ref_logprobs == (-2.0, -2.0) for s in policy.trained[0])


def test_the_kl_of_the_reward_is_measured_before_the_batch_and_nothing_is_computed_twice() -> None:
    policy = _Policy()
    config = AlgorithmConfig.model_validate(
        {"kl_coef": 0.1, "epochs": 2, "reward_kl": {"coef": 0.1, "type": "k2"}}
    )
    measured = measure_reference(policy, _SEQUENCES, config, temperature=0.7)
    assert _floats(measured.kl) == [0.5] * 3  # (-1 - -2)^2 / 2
    assert policy.temperatures == {0.7}
    prepared = [
        replace(s, old_logprobs=old, ref_logprobs=ref)
        for s, old, ref in zip(
            _SEQUENCES,
            of_loss_tokens(_SEQUENCES, measured.old_logprobs),
            of_loss_tokens(_SEQUENCES, measured.ref_logprobs),
            strict=True,
        )
    ]
    policy.logprob = -3.0  # what would be computed now
    run_update(policy, prepared, config, temperature=0.7)
    assert all(s.old_logprobs == (0.0, -1.0) for part in policy.trained for s in part)
    assert all(s.ref_logprobs == (0.0, -2.0) for part in policy.trained for s in part)


def test_the_servers_probabilities_may_be_those_of_the_kl() -> None:
    config = AlgorithmConfig.model_validate({"old_logprobs": "rollout", "reward_kl": {"coef": 0.1}})
    measured = measure_reference(_Policy(), _SEQUENCES, config, temperature=1.0)
    assert _floats(measured.kl) == [1.5] * 3
    assert not measured.HasField("old_logprobs") and not measured.HasField("ref_logprobs")


@given(st.integers(1, 40), st.integers(1, 12))
def test_parts_are_contiguous_even_and_never_empty(length: int, parts: int) -> None:
    sequences = [_SEQUENCES[n % 3] for n in range(length)]
    cuts = cut(sequences, parts)
    assert [s for part in cuts for s in part] == sequences
    sizes = [len(part) for part in cuts]
    assert len(sizes) == min(parts, length)
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 6))
def test_samples_of_one_trajectory_stay_in_one_part(samples: list[int], parts: int) -> None:
    sequences = [
        replace(_SEQUENCES[0], trajectory=number if count > 1 else None)
        for number, count in enumerate(samples)
        for _ in range(count)
    ]
    cuts = cut(sequences, parts)
    assert [s for part in cuts for s in part] == sequences
    assert len(cuts) == min(parts, len(samples))
    owners = [{s.trajectory for s in part} - {None} for part in cuts]
    assert sum(map(len, owners)) == len(set().union(*owners))
