"""The KL penalty in the reward: what each sampled token costs, and how its coefficient changes.

Ziegler et al. (arXiv:1909.08593), section 2.1, R = r - beta log(pi / rho), and section 2.2 for the
adaptive beta, as verl's `apply_kl_penalty` and `AdaptiveKLController`. The estimators of the KL are
in `algorithms/kl.py`; policy ranks compute them, the driver does the rest, without torch.

Invariant: the coefficient of a step is a function of the metrics of the step before, which a
checkpoint carries. So a run that resumes uses the same coefficients, bit for bit.

Shape suffix: L tokens of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.policy.client.types import TrainSequence
    from treadle.policy.config.algorithm import RewardKlConfig

__all__ = ["COEFFICIENT", "NUM_SEQUENCES", "PENALTY", "Charges", "coefficient_after"]

PENALTY: Final = "actor/reward_kl_penalty"
"""Estimated KL(policy || reference): the mean over sequences of their mean per token, in nats."""
COEFFICIENT: Final = "actor/reward_kl_penalty_coeff"
"""The coefficient of this step."""
NUM_SEQUENCES: Final = "sequences/trained"
MAX_ERROR: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """The costs of the tokens of a batch, to be subtracted from rewards.

    Attributes:
        of_tokens: [L] of each sequence, to subtract from the reward at each loss token; None:
            nothing is charged.
    """

    of_tokens: Sequence[NDArray[np.float64]] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        sequences: Sequence[TrainSequence],
        kl: Sequence[Sequence[float]],
        coefficient: float,
    ) -> Charges:
        """Returns what the KL costs.

        Args:
            sequences: Each has a loss token.
            kl: [L] of each sequence: its estimate at each loss token.
        """
        return cls(
            of_tokens=[coefficient * np.asarray(values, dtype=np.float64) for values in kl],
            metrics={PENALTY: _mean_of_sequences(sequences, kl), COEFFICIENT: coefficient},
        )


def coefficient_after(config: RewardKlConfig, metrics: Mapping[str, float]) -> float:
    """Returns the coefficient of the step after the one with these metrics.

    With control=adaptive, beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), where n is the
    number of sequences of the step.

    Args:
        metrics: Metrics of the step before; without its coefficient, the run's first step comes
            next.
    """
    if config.control == "fixed" or COEFFICIENT not in metrics:
        return config.coef
    error = metrics[PENALTY] / config.target - 1.0
    error = min(max(error, -MAX_ERROR), MAX_ERROR)
    return metrics[COEFFICIENT] * (1.0 + error * metrics[NUM_SEQUENCES] / config.horizon)


def _mean_of_sequences(sequences: Sequence[TrainSequence], kl: Sequence[Sequence[float]]) -> float:
    means = [
        math.fsum(np.asarray(values, dtype=np.float64)[s.loss_positions].tolist())
        / s.num_loss_tokens
        for s, values in zip(sequences, kl, strict=True)
    ]
    return math.fsum(means) / len(means)
