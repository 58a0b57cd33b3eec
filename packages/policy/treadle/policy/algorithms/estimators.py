"""Finds an advantage estimator: by name, of an installed package, or in the user's own file.

Invariant: what `find_estimator` returns gives one finite advantage per trajectory, or per sampled
token; anything else is an error that names the estimator.

A package offers estimators by name with an entry point of the group `treadle.advantages`:

    [project.entry-points."treadle.advantages"]
    median = "my_package.advantages:median"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from treadle.agent_loop import SetupError, cannot_load, load_import_path, user_place
from treadle.agent_loop.errors import did_you_mean
from treadle.policy.algorithms import advantages
from treadle.policy.algorithms.advantages import Floats, Outcomes, PerToken
from treadle.policy.algorithms.gae import whitened_gae
from treadle.policy.config.algorithm import AlgorithmConfig

__all__ = ["ENTRY_POINTS", "NAMED", "AdvantageError", "FoundEstimator", "find_estimator"]

ENTRY_POINTS: Final = "treadle.advantages"


class AdvantageError(RuntimeError):
    """An estimator failed, or returned what cannot be trained with; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEstimator:
    """An estimator, and what it needs.

    Attributes:
        settings: Names of settings of `algorithm`, which the function takes as arguments.
        compares: Whether it compares the trajectories of a group, and so needs two of them.
        min_samples: Trajectories of a row below which nothing can have an advantage.
    """

    name: str
    function: Callable[..., Floats | PerToken]
    settings: tuple[str, ...] = ()
    compares: bool = True
    needs_greedy: bool = False
    needs_values: bool = False
    min_samples: int = 1

    def __call__(self, outcomes: Outcomes) -> Floats | PerToken:
        """Returns what the function returned.

        Raises:
            AdvantageError: It raised an error, or returned anything but one finite number per
                trajectory or per sampled token.
        """
        try:
            found = self.function(outcomes)
        except Exception as error:  # the user's function may raise anything
            place = user_place(error)
            at = "" if place is None else f" ({place})"
            raise AdvantageError(
                f"algorithm.advantage={self.name}: {type(error).__name__}: {error}{at}"
            ) from error
        if isinstance(found, PerToken):
            count = int(outcomes.tokens_S.sum())
            values = self._checked(found.values_T, count, "sampled token")
            if found.returns_T is None:
                return PerToken(values)
            return PerToken(values, self._checked(found.returns_T, count, "return of a token"))
        return self._checked(found, len(outcomes.rewards_N), "trajectory")

    def _checked(self, found: object, wanted: int, each: str) -> Floats:
        setting = f"algorithm.advantage={self.name}"
        try:
            values = np.asarray(found, np.float64)
        except (TypeError, ValueError):
            raise AdvantageError(
                f"{setting} returned {found!r:.80}; it must return one number per {each}"
            ) from None
        if values.shape != (wanted,):
            raise AdvantageError(
                f"{setting} returned an array of shape {values.shape}; it must return one number "
                f"per {each}, that is ({wanted},)"
            )
        if not np.isfinite(values).all():
            first = int(np.flatnonzero(~np.isfinite(values))[0])
            raise AdvantageError(
                f"{setting} returned {values[first]} for {each} {first}; it must be finite"
            )
        return values


_BUILT_IN: Final = (
    FoundEstimator(name="dr_grpo", function=advantages.dr_grpo),
    FoundEstimator(
        name="gae",
        function=whitened_gae,
        settings=("gamma", "lam"),
        compares=False,
        needs_values=True,
    ),
    FoundEstimator(name="gpg", function=advantages.gpg),
    FoundEstimator(name="grpo", function=advantages.grpo, settings=("norm_by_std",)),
    FoundEstimator(
        name="grpo_passk",
        function=advantages.grpo_passk,
        settings=("norm_by_std",),
        min_samples=2,
    ),
    FoundEstimator(name="maxrl", function=advantages.maxrl, min_samples=2),
    FoundEstimator(name="opo", function=advantages.opo),
    FoundEstimator(
        name="reinforce_plus_plus",
        function=advantages.reinforce_plus_plus,
        settings=("gamma",),
        compares=False,
    ),
    FoundEstimator(
        name="reinforce_plus_plus_baseline", function=advantages.reinforce_plus_plus_baseline
    ),
    FoundEstimator(name="remax", function=advantages.remax, compares=False, needs_greedy=True),
    FoundEstimator(name="rloo", function=advantages.rloo),
)
NAMED: Final[Mapping[str, FoundEstimator]] = MappingProxyType(
    {each.name: each for each in _BUILT_IN}
)
"""The estimators of this package, by the names that `algorithm.advantage` takes."""


def find_estimator(config: AlgorithmConfig) -> FoundEstimator:
    """Returns the estimator that the settings name.

    Raises:
        SetupError: There is none of this name, or it cannot be loaded.
    """
    name = config.advantage
    if name in NAMED:
        named = NAMED[name]
        settings: dict[str, Any] = {key: getattr(config, key) for key in named.settings}
        return replace(named, function=partial(named.function, **settings))
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if ":" in name:
        function = load_import_path(name, "advantage estimator")
    elif name in installed:
        function = _load_installed(installed[name])
    else:
        known = sorted({*NAMED, *installed})
        raise SetupError(
            f"algorithm.advantage={name}: there is no such estimator{did_you_mean(name, known)}; "
            f"there are: {', '.join(known)}. Your own is given as path.py:function or "
            "module:function"
        )
    if not callable(function):
        raise SetupError(f"algorithm.advantage={name} is {function!r}, which is not a function")
    return FoundEstimator(name=name, function=function)


def _load_installed(point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as error:  # the package's module may raise anything
        where = f"the entry point {point.name!r} = {point.value!r}"
        raise cannot_load(where, "advantage estimator", error) from error
