"""Rewards by name, by data source, or from a file of the user's: all end as one kind of function.

Invariant: whatever the way, the result is a `RewardFn`, called with a finished trajectory and
giving a finite float; what else a function returns is an error that names the function. What can
be wrong with a name is found when it is looked up, not at the end of the first trajectory.
Nobody waits here; a user's function may be async, and then the runner awaits it.

    get("gsm8k", mode="strict")                    # by name
    by_data_source(mode="strict")                  # each row by its own `data_source`
    load("rewards/mine.py:compute_score")          # a file, or "package.module:function"

A named reward reads the last assistant message of the trajectory and the row's
`reward_model.ground_truth`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from treadle.agent_loop import RewardError, RewardFn, SetupError, Trajectory
from treadle.tools.arguments import did_you_mean
from treadle.tools.rewards import gsm8k
from treadle.tools.rewards.user import load

TextReward = Callable[[str, str, gsm8k.Mode], float]
"""(answer text, ground truth, mode) to a score."""


def _gsm8k(text: str, ground_truth: str, mode: gsm8k.Mode) -> float:
    return gsm8k.score(text, ground_truth, mode=mode)


NAMED: Final[Mapping[str, TextReward]] = MappingProxyType({"gsm8k": _gsm8k})

DATA_SOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "openai/gsm8k": "gsm8k",
        "treadle/calculator": "gsm8k",
    }
)
"""A row's `data_source` to the name of its reward."""


def resolve(name: str | None, *, mode: str = "strict") -> RewardFn:
    """The reward that a configuration names.

    Args:
        name: None for `by_data_source`, "file.py:function" or "module:function" for `load`,
            otherwise a name for `get`.
        mode: How an answer is read, by the rewards of this package; see `gsm8k.MODES`.

    Raises:
        SetupError: There is no such reward, mode or function.
    """
    if name is None:
        return by_data_source(mode=mode)
    if ":" in name:
        return load(name)
    return get(name, mode=mode)


def get(name: str, *, mode: str = "strict") -> RewardFn:
    """The reward called `name`.

    Raises:
        SetupError: There is no such reward or mode; the message lists those there are.
    """
    if name not in NAMED:
        raise SetupError(
            f"there is no reward {name!r}{did_you_mean(name, NAMED)}; there are: "
            f"{', '.join(sorted(NAMED))}. Your own is given as path.py:function or module:function"
        )
    return partial(_score, NAMED[name], _checked(mode))


def by_data_source(*, mode: str = "strict") -> RewardFn:
    """A reward that scores each trajectory by the `data_source` of its row.

    Raises:
        SetupError: There is no such mode. Rows with an unknown data source are found by
            `check_data_sources`; one that was not checked fails its own trajectory.
    """
    return partial(_score_by_source, _checked(mode))


def check_data_sources(sources: Iterable[object]) -> None:
    """Refuse rows that `by_data_source` could not score; call it before the first step.

    Raises:
        SetupError: Names every unknown source, and those that are known.
    """
    unknown = sorted({str(source) for source in sources} - set(DATA_SOURCES))
    if unknown:
        raise SetupError(
            f"no reward is known for data_source {', '.join(map(repr, unknown))}"
            f"{did_you_mean(unknown[0], DATA_SOURCES)}; known are: "
            f"{', '.join(sorted(DATA_SOURCES))}. Name a reward for all rows, or give your own as "
            "path.py:function or module:function"
        )


def _score(reward: TextReward, mode: gsm8k.Mode, trajectory: Trajectory) -> float:
    return reward(trajectory.final_text, _ground_truth(trajectory), mode)


def _score_by_source(mode: gsm8k.Mode, trajectory: Trajectory) -> float:
    source = trajectory.task.fields.get("data_source")
    name = DATA_SOURCES.get(source) if isinstance(source, str) else None
    if name is None:
        raise RewardError(
            f"task {trajectory.task.task_id!r}: no reward is known for data_source {source!r}"
        )
    return _score(NAMED[name], mode, trajectory)


def _ground_truth(trajectory: Trajectory) -> str:
    reward_model = trajectory.task.fields.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if not isinstance(truth, str):
        raise RewardError(
            f"task {trajectory.task.task_id!r}: reward_model.ground_truth must be a string, "
            f"not {truth!r}"
        )
    return truth


def _checked(mode: str) -> gsm8k.Mode:
    for known in gsm8k.MODES:
        if mode == known:
            return known
    raise SetupError(f"there is no reward mode {mode!r}; there are: {', '.join(gsm8k.MODES)}")
