"""Looks up rewards by name, by data source, or by the path of the user's own function.

Invariant: the result is always a `RewardFn`, which takes a finished trajectory and returns a
`Score`; any other return value is an error that names the function. An invalid name is found when
it is looked up, not at the end of the first trajectory. A plain function of the user's runs in a
separate process (`time_limited`): it may hold the interpreter's lock, and only a process can end.

    resolve("gsm8k", mode="fixed")                 # by name
    resolve(None)                                  # each row by its own `data_source`
    resolve("rewards/mine.py:compute_score")       # a file, or "package.module:function"
    resolve("brevity", timeout_s=5)                # an installed package's, with a time limit
    resolve("rubric.yaml")                         # a judge: entered before the first trajectory
    resolve("reward_model.yaml")                   # a model with a scalar head: likewise
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from treadle.agent_loop import RewardError, RewardFn, Score, SetupError, Trajectory
from treadle.agent_loop.errors import did_you_mean
from treadle.tools.arguments import require_extra
from treadle.tools.rewards.judge import Judge
from treadle.tools.rewards.named import NAMED, NamedReward, name_for_source, sources
from treadle.tools.rewards.reward_model import RewardModel, read_settings
from treadle.tools.rewards.time_limited import TimeLimitedReward
from treadle.tools.rewards.user import UserReward, installed, load, load_installed
from treadle.tools.rewards.weighted import weighed
from treadle.tools.yaml_config import read_yaml


def resolve(
    name: str | None,
    *,
    mode: str | None = None,
    timeout_s: float | None = None,
    timeout_score: float = 0.0,
    optional: bool = False,
) -> RewardFn:
    """Returns the reward that a configuration names.

    Args:
        name: None for each row by its data source; "file.py:function" or "module:function" for
            your own function; a .yaml or .yml file for the judge or the reward model that it
            describes; otherwise a name of this package or of an installed one.
        mode: How an answer is read or scored, for rewards of this package with several modes.
            None: the first mode of each.
        timeout_s: Maximum seconds to score one trajectory, always in a separate process then. None:
            the user's plain functions run in a separate process, until their caller is cancelled;
            others in this one, except for rewards that need a limit.
        timeout_score: Reward of a trajectory that could not be scored within `timeout_s`.
        optional: Whether your own function may return None.

    Raises:
        SetupError: There is no such reward, mode or function, or its library is not installed.
    """
    if name is None:
        return _by_data_source(
            mode, partial(resolve, timeout_s=timeout_s, timeout_score=timeout_score)
        )
    if name.endswith((".yaml", ".yml")):
        return _of_model(Path(name), mode=mode, timeout_s=timeout_s)
    make = _maker(name, mode, optional)
    reward = make()
    limit = timeout_s
    if limit is None and name in NAMED:
        limit = NAMED[name].timeout_s
    if limit is None and (name in NAMED or (isinstance(reward, UserReward) and reward.is_async)):
        return reward
    if name in NAMED:
        make = partial(_prepared, name, mode)
    return TimeLimitedReward(
        make, name=name, timeout_s=limit, timeout_score=timeout_score, function=reward
    )


def resolve_all(
    names: Sequence[str],
    *,
    weights: Mapping[str, float],
    mode: str | None,
    timeout_s: float | None,
    timeout_score: float,
) -> RewardFn:
    """Returns the rewards that a configuration names, as one; see `resolve`.

    Args:
        names: None of them is None; empty for each row by its data source.
        weights: By the short names of the rewards (`weighted.short_name`).
        mode: For those of several that have modes.

    Raises:
        SetupError: As `resolve`, two have one name, one has that of another metric, or a weight is
            of none of them.
    """
    resolved = partial(resolve, timeout_s=timeout_s, timeout_score=timeout_score)
    if not (names or weights):
        return resolved(None, mode=mode)
    of_none = NAMED.keys().isdisjoint(names)  # the first one refuses it
    modes = {name: mode if of_none or name in NAMED else None for name in names}
    makers = [(name, partial(resolved, name, mode=modes[name])) for name in names]
    return weighed(makers, weights)


def _of_model(path: Path, *, mode: str | None, timeout_s: float | None) -> RewardFn:
    for key, value in (("mode", mode), ("timeout_s", timeout_s)):
        if value is not None:
            raise SetupError(
                f"the reward {path} is a rubric or a reward model and takes no {key}={value}; a "
                "rubric has its own timeout_s"
            )
    document = read_yaml(path, "rubric or reward model", literal=True)
    if isinstance(document, Mapping) and "reward_model" in document:
        settings = read_settings(document, f"the reward model {path}", path.parent)
        return RewardModel(settings)
    return Judge.from_file(path)


def check_data_sources(found: Iterable[object], *, mode: str | None = None) -> None:
    """Rejects rows that `resolve(None)` could not score; call it before the first step.

    Raises:
        SetupError: A source is unknown (the message names the known ones), or a reward lacks
            `mode` or its library.
    """
    given = {str(source) for source in found}
    unknown = sorted(source for source in given if name_for_source(source) is None)
    if unknown:
        known = sources()
        raise SetupError(
            f"no reward is known for data_source {', '.join(map(repr, unknown))}"
            f"{did_you_mean(unknown[0], known)}; known are: {', '.join(known)}. Name a reward for "
            "all rows, or give your own as path.py:function or module:function"
        )
    for source in sorted(given):
        name = name_for_source(source)
        assert name is not None, "unknown sources have been refused"
        _checked(NAMED[name], name, mode)


def _maker(name: str, mode: str | None, optional: bool) -> Callable[[], RewardFn]:
    """Returns a function that makes the reward, here or in another process."""
    if name in NAMED:
        return partial(_named, name, mode)
    if mode is not None:
        raise SetupError(
            f"the reward {name!r} has no modes, so it cannot be scored in mode {mode!r}"
        )
    if ":" in name:
        return partial(load, name, optional=optional)
    if name in installed():
        return partial(load_installed, name, optional=optional)
    known = sorted({*NAMED, *installed()})
    raise SetupError(
        f"there is no reward {name!r}{did_you_mean(name, known)}; there are: {', '.join(known)}. "
        "Your own is given as path.py:function or module:function"
    )


def _named(name: str, mode: str | None) -> RewardFn:
    reward = NAMED[name]
    return partial(_score, reward, _checked(reward, name, mode))


def _prepared(name: str, mode: str | None) -> RewardFn:
    """Loads the reward's library in the separate process, outside the time limit."""
    NAMED[name].prepare()
    return _named(name, mode)


def _by_data_source(mode: str | None, resolved: Callable[..., RewardFn]) -> RewardFn:
    if mode is not None and not any(mode in reward.modes for reward in NAMED.values()):
        known = sorted({known for reward in NAMED.values() for known in reward.modes})
        raise SetupError(f"there is no reward mode {mode!r}; there are: {', '.join(known)}")
    rewards: dict[str, RewardFn] = {}

    def score(trajectory: Trajectory) -> float | Score | Awaitable[float | Score]:
        source = trajectory.task.fields.get("data_source")
        name = name_for_source(source) if isinstance(source, str) else None
        if name is None:
            raise RewardError(
                f"task {trajectory.task.task_id!r}: no reward is known for data_source {source!r}"
            )
        if name not in rewards:
            rewards[name] = resolved(name, mode=mode)
        return rewards[name](trajectory)

    return score


def _score(reward: NamedReward, mode: str, trajectory: Trajectory) -> Score:
    return reward.score(trajectory, mode)


def _checked(reward: NamedReward, name: str, mode: str | None) -> str:
    if reward.needs is not None:
        require_extra(f"the reward {name}", *reward.needs)
    if mode is None:
        return reward.modes[0]
    if mode not in reward.modes:
        raise SetupError(
            f"the reward {name} has no mode {mode!r}; it has: {', '.join(reward.modes)}"
        )
    return mode
