"""The settings of the off-policy correction; `algorithms/correction.py` has the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from treadle.policy.config.base import Section

CRITERIA = (
    *("token_k1", "token_k2", "token_k3"),
    *("sample_sum_k1", "sample_sum_k2", "sample_sum_k3"),
    *("sample_mean_k1", "sample_mean_k2", "sample_mean_k3"),
    *("sample_max_k2", "sample_max_k3"),
)


class CorrectionConfig(Section):
    """Corrects for tokens whose probability was another when they were sampled.

    By default nothing is corrected. w is the policy's probability of a token at the start of the
    batch, divided by the one that the server reported.
    """

    weights: Literal["none", "token", "sample"] = "none"
    """Multiply a token's policy loss by its w, or by the product of all w of its sample."""
    low: float = Field(default=0.0, ge=0, le=1)
    """Lower end of the band of weights."""
    high: float = Field(default=2.0, ge=1)
    """Upper end of the band of weights."""
    outside: Literal["truncate", "mask"] = "truncate"
    """What to use for a weight outside the band: the nearer end of the band, or 0."""
    reject: Mapping[str, tuple[float, ...]] = {}
    """Tokens or samples to leave out, by criterion: token_k1, sample_sum_k1 or sample_mean_k1 (the
    geometric mean) with the bounds [low, high] of w; token_k2, sample_sum_k2, sample_mean_k2,
    sample_max_k2, and the same with k3, with the largest estimate of the KL, in nats."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Leave out a sample in which the w of any token is below this. Null: none."""
    tokens: Literal["all", "stale"] = "all"
    """stale: take w as 1 for tokens that only the policy's present weights sampled."""

    @property
    def active(self) -> bool:
        """Whether anything is weighted or left out."""
        return self.weights != "none" or bool(self.reject) or self.veto is not None

    @field_validator("reject", mode="before")
    @classmethod
    def _one_bound_needs_no_brackets(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        return {name: [v] if isinstance(v, int | float) else v for name, v in given.items()}

    @model_validator(mode="after")
    def _criteria_have_their_bounds(self) -> Self:
        for name, bounds in self.reject.items():
            written = list(bounds) if len(bounds) != 1 else bounds[0]
            if name not in CRITERIA:
                raise ValueError(
                    f"reject.{name}={written}: there is no such criterion; the known ones are "
                    + ", ".join(CRITERIA)
                )
            if name.endswith("k1"):
                if len(bounds) != 2 or not 0 < bounds[0] <= 1 <= bounds[1]:
                    raise ValueError(
                        f"reject.{name}={written}: give bounds of the ratio around 1, as [0.5,2]"
                    )
            elif len(bounds) != 1 or bounds[0] <= 0:
                raise ValueError(
                    f"reject.{name}={written}: give the largest estimate, one number above 0"
                )
        return self
