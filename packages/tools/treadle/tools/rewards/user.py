"""Loads the user's own reward: "file.py:function", "package.module:function" or an entry point.

Invariant: a path that cannot be resolved is an error at start; a function that does
not return a finite number fails its trajectory with an error that names the function.

The parameters of the function decide between three signatures:

- `reward(trajectory)`: ours, plain or async.
- `reward(trajectories)`: of a whole group. It gets a tuple of the row's trajectories that ended
  well, in the order of their numbers, and returns one result for each (`weighted`).
- `compute_score(data_source, solution_str, ground_truth, extra_info)`: verl's
  `custom_reward_function`. `solution_str` is the last assistant message; `extra_info` gets
  `num_turns` as in verl.

Further parameters are columns of the row or values of its `extra_info`, by their names.

Each returns a number, a `Score`, or as in verl a mapping with "score": its other numbers become
metrics `reward/<key>`, and the text under "pred" is the answer that validation votes on. None is
for a trajectory that one of several rewards does not judge.

A package offers rewards by name with an entry point of the group `treadle.rewards`:

    [project.entry-points."treadle.rewards"]
    brevity = "my_package.rewards:brevity"
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from treadle.agent_loop import (
    RewardError,
    Score,
    SetupError,
    Trajectory,
    cannot_load,
    load_import_path,
)
from treadle.agent_loop.row_arguments import Parameters

ENTRY_POINTS = "treadle.rewards"
GROUP = "trajectories"
OF_MESSAGES = frozenset({"prompt", "images"})
"""Columns that a task has in its messages, and not in its fields."""
_VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth")
_OF_TRL = ("completions", "prompts")


@dataclass(frozen=True, slots=True, eq=False)
class UserReward:
    """A function of the user as a reward.

    Attributes:
        name: Names it in messages, as the configuration does.
        optional: Whether it may return None.
        parameters: Parameters beside the trajectory, or the trajectories of a group.
        takes: The name of its first parameter if that is the trajectory, or those of a group; None:
            it has verl's parameters.

    Raises:
        SetupError: It cannot be called, or not with a trajectory.
    """

    name: str
    function: Callable[..., object]
    parameters: Parameters
    optional: bool = False
    takes: str | None = None

    @classmethod
    def of(cls, name: str, function: object, *, optional: bool = False) -> UserReward:
        """Makes it, with `takes` from the function's signature."""
        if not callable(function) or isinstance(function, type):
            raise SetupError(f"the reward {name!r} is {function!r}, which is not a function")
        parameters = inspect.signature(function).parameters
        if all(each in parameters for each in _VERL_PARAMETERS):
            return cls(name, function, Parameters.of(function), optional)
        first = next((p for p in parameters.values() if p.kind < p.KEYWORD_ONLY), None)
        if first is None or first.name in _OF_TRL:
            raise SetupError(
                f"the reward {name} takes ({', '.join(parameters)}); it must take (trajectory), "
                f"({GROUP}) for those of a whole group, or verl's ({', '.join(_VERL_PARAMETERS)}, "
                "extra_info); columns of the row may follow by their names"
            )
        return cls(name, function, Parameters.of(function, leading=1), optional, first.name)

    @property
    def of_group(self) -> bool:
        """Whether it is called with the trajectories of a whole group."""
        return self.takes == GROUP

    @property
    def is_async(self) -> bool:
        """Whether the function is `async`."""
        call: Any = self.function
        return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(call.__call__)

    def check_row(self, fields: Mapping[str, object]) -> None:
        """Raises `SetupError` if a row with these columns lacks a parameter's value."""
        extra = fields.get("extra_info")
        own = extra if isinstance(extra, Mapping) else {}
        for name in sorted(self.parameters.defaults.keys() & fields.keys() & OF_MESSAGES):
            if own.get(name) is None:
                raise SetupError(
                    f"the reward {self.name} takes {name}, a column that the row's messages are "
                    "made of: read trajectory.task.messages, or write the value into the row's "
                    "extra_info too"
                )
        self._arguments({n: value for n, value in fields.items() if n not in OF_MESSAGES})

    def __call__(self, given: Trajectory | Sequence[Trajectory]) -> Any:
        """Returns the score of a trajectory, or a list of those of a group; later, if `is_async`.

        Raises:
            RewardError: The function returned no score.
        """
        one = given if isinstance(given, Trajectory) else given[0]
        first = () if self.takes is None else (given,)
        result = self.function(*first, **self._arguments(one.task.fields, one))
        if isinstance(result, Awaitable):
            return self._later(result, given)
        return self._read(result, given)

    async def _later(
        self, result: Awaitable[object], given: Trajectory | Sequence[Trajectory]
    ) -> Score | list[Score | None] | None:
        return self._read(await result, given)

    def _arguments(
        self, fields: Mapping[str, object], trajectory: Trajectory | None = None
    ) -> dict[str, object]:
        """Returns the arguments beside the trajectory; without one, for the check of the row."""
        what = f"the reward {self.name}"
        if self.takes is not None:
            return self.parameters.arguments(what, fields)
        reward_model, extra = fields.get("reward_model"), fields.get("extra_info")
        info = dict(extra) if isinstance(extra, Mapping) else {}
        turns = {} if trajectory is None else {"num_turns": trajectory.num_turns}
        known = {
            "data_source": fields.get("data_source"),
            "solution_str": "" if trajectory is None else trajectory.final_text,
            "ground_truth": (
                reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
            ),
            "extra_info": {**info, **turns},
        }
        names = self.parameters.defaults
        named = {name: value for name, value in known.items() if name in names}
        if self.parameters.every:
            # As verl's: it may pass on what it gets beside its parameters.
            fields = {n: v for n, v in fields.items() if n in names and n not in known}
        return self.parameters.arguments(what, fields, named)

    def _read(
        self, result: object, given: Trajectory | Sequence[Trajectory]
    ) -> Score | list[Score | None] | None:
        if isinstance(given, Trajectory):
            return self._score(result)
        if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != len(given):
            raise RewardError(
                f"the reward {self.name} returned {result!r:.80} for {len(given)} {GROUP}; it must "
                "return a list with one result for each"
            )
        return [self._score(each) for each in result]

    def _score(self, result: object) -> Score | None:
        if result is None and self.optional:
            return None
        try:
            score = Score.of(result)
        except ValueError as error:
            raise RewardError(f"the reward {self.name}: {error}") from error
        return replace(score, value=float(score.value))


def load(reference: str, *, optional: bool = False) -> UserReward:
    """Returns the reward function that `reference` names.

    Args:
        optional: Whether it may return None.

    Raises:
        SetupError: The path is malformed, the file or module cannot be loaded, it has no
            such function, or the function takes other parameters than the known signatures.
    """
    return UserReward.of(reference, load_import_path(reference, "reward"), optional=optional)


def from_function(function: Callable[..., object], *, optional: bool = False) -> UserReward:
    """Returns the reward function that a program gives as an object.

    Args:
        optional: Whether it may return None.

    Raises:
        SetupError: It is not callable, or takes other parameters than the known signatures.
    """
    return UserReward.of(function_name(function), function, optional=optional)


def function_name(function: object) -> str:
    """Returns the name of a function; of a partial, that of its function; else the class's."""
    called = function.func if isinstance(function, partial) else function
    name = getattr(called, "__qualname__", None)
    return name if isinstance(name, str) else type(called).__qualname__


def installed() -> Mapping[str, EntryPoint]:
    """Returns the rewards that installed packages offer, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def load_installed(name: str, *, optional: bool = False) -> UserReward:
    """Returns the reward that an installed package offers as `name`.

    Args:
        optional: Whether it may return None.

    Raises:
        SetupError: No package does, or it cannot be loaded, or takes other parameters than the
            known signatures.
    """
    point = installed().get(name)
    if point is None:
        raise SetupError(f"no installed package offers a reward {name!r}")
    try:
        function = point.load()
    except Exception as error:
        where = f"the entry point {name!r} = {point.value!r}"
        raise cannot_load(where, "reward", error) from error
    return UserReward.of(name, function, optional=optional)
