"""Loads the user's own reward: "file.py:function", "package.module:function" or an entry point.

Invariant: a path that cannot be resolved is an error at start that says why; a function that does
not return a finite number fails its trajectory with an error that names the function.

The parameters of the function decide between two signatures:

- `reward(trajectory)`: ours, plain or async.
- `compute_score(data_source, solution_str, ground_truth, extra_info)`: verl's
  `custom_reward_function`. `solution_str` is the last assistant message; `extra_info` gets
  `num_turns` as in verl.

Either returns a number, a `Score`, or as in verl a mapping with "score": its other numbers become
metrics `reward/<key>`, and the text under "pred" is the answer that validation votes on.

A package offers rewards by name with an entry point of the group `treadle.rewards`:

    [project.entry-points."treadle.rewards"]
    brevity = "my_package.rewards:brevity"
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from treadle.agent_loop import (
    RewardError,
    RewardFn,
    Score,
    SetupError,
    Trajectory,
    cannot_load,
    load_import_path,
)

ENTRY_POINTS = "treadle.rewards"
_VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth")


def load(reference: str) -> RewardFn:
    """Returns the reward function that `reference` names.

    Raises:
        SetupError: The path is malformed, the file or module cannot be loaded, it has no
            such function, or the function takes other parameters than the two known signatures.
    """
    function = load_import_path(reference, "reward")
    if not callable(function):
        raise SetupError(f"the reward {reference!r} is {function!r}, which is not a function")
    return _adapt(reference, function)


def from_function(function: Callable[..., object]) -> RewardFn:
    """Returns the reward function that a program gives as an object.

    Raises:
        SetupError: It is not callable, or takes other parameters than the two known signatures.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise SetupError(f"the reward is {function!r}, which is not a function")
    return _adapt(name, function)


def installed() -> Mapping[str, EntryPoint]:
    """Returns the rewards that installed packages offer, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def load_installed(name: str) -> RewardFn:
    """Returns the reward that an installed package offers as `name`.

    Raises:
        SetupError: No package does, or it cannot be loaded, or takes other parameters than the
            two known signatures.
    """
    point = installed().get(name)
    if point is None:
        raise SetupError(f"no installed package offers a reward {name!r}")
    try:
        function = point.load()
    except Exception as error:
        where = f"the entry point {name!r} = {point.value!r}"
        raise cannot_load(where, "reward", error) from error
    if not callable(function):
        raise SetupError(f"the reward {name!r} = {point.value!r} is not a function")
    return _adapt(name, function)


def _adapt(reference: str, function: Callable[..., object]) -> RewardFn:
    parameters = inspect.signature(function).parameters
    if all(name in parameters for name in _VERL_PARAMETERS):
        call = _verl_call(function, takes_extra="extra_info" in parameters)
    else:
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            raise SetupError(
                f"the reward {reference} takes ({', '.join(parameters)}); it must take "
                f"(trajectory) or verl's ({', '.join(_VERL_PARAMETERS)}, extra_info)"
            ) from None
        call = function
    if inspect.iscoroutinefunction(function):

        async def score_later(trajectory: Trajectory) -> Score:
            result = call(trajectory)
            assert isinstance(result, Awaitable)
            return _score(reference, await result)

        return score_later

    def score(trajectory: Trajectory) -> Score:
        return _score(reference, call(trajectory))

    return score


def _verl_call(
    function: Callable[..., object], *, takes_extra: bool
) -> Callable[[Trajectory], object]:
    def call(trajectory: Trajectory) -> object:
        fields = trajectory.task.fields
        reward_model = fields.get("reward_model")
        extra: dict[str, object] = {}
        if takes_extra:
            given = fields.get("extra_info")
            info = dict(given) if isinstance(given, Mapping) else {}
            extra["extra_info"] = {**info, "num_turns": trajectory.num_turns}
        return function(
            data_source=fields.get("data_source"),
            solution_str=trajectory.final_text,
            ground_truth=reward_model.get("ground_truth")
            if isinstance(reward_model, Mapping)
            else None,
            **extra,
        )

    return call


def _score(reference: str, result: object) -> Score:
    """Returns what a function returned, as a score."""
    try:
        score = Score.of(result)
    except ValueError as error:
        raise RewardError(f"the reward {reference}: {error}") from error
    return replace(score, value=float(score.value))
