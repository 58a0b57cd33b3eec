"""Which trajectories of a step are traced: a pure function of step and sample.

Invariant: the choice does not depend on the process that makes it, on the order of the samples or
on any random state, so that a resumed run traces the same trajectories, several workers agree
without talking, and drawing the choice disturbs nobody's random numbers. All trajectories of one
group are chosen together: they are worth comparing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

_RANGE = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSampler:
    """Chooses the fraction `rate` (0 to 1) of the samples of each step; `seed` picks others.

    Raises:
        ValueError: `rate` is not within 0 and 1.
    """

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(
                f"the rate of traced trajectories must be between 0 and 1, got {self.rate}"
            )

    def wants(self, step: int, sample_index: int) -> bool:
        """True if the trajectories of this sample are traced in this step."""
        return self._hash(step, sample_index) < self.rate * _RANGE

    def choose(
        self, step: int, sample_indices: Iterable[int], *, at_most: int | None
    ) -> frozenset[int]:
        """Returns those of the samples that are traced, and of these no more than `at_most`."""
        wanted = {index for index in sample_indices if self.wants(step, index)}
        return frozenset(sorted(wanted, key=lambda index: self._hash(step, index))[:at_most])

    def _hash(self, step: int, sample_index: int) -> int:
        key = f"{self.seed}:{step}:{sample_index}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
