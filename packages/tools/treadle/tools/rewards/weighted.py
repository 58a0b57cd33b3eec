"""Several rewards as one: the sum of their results by weights, and a metric for each.

Invariant: a trajectory has the metric `reward/NAME` of each reward that judged it, without the
weight. One that returns None does not judge the trajectory and adds nothing. A trajectory that no
reward judges fails.

Rewards that take `trajectories` compare: they get those of a row that ended well at once, when the
last one has ended, and `of_group` adds what they return. That is done in the driver, whichever
process ran the trajectories. If such a reward fails, so do all trajectories of the group; if it is
late, they are late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any

from treadle.agent_loop import (
    RewardError,
    RewardFn,
    RolloutError,
    Score,
    SetupError,
    Trajectory,
    TrajectoryTimeoutError,
    boundary,
)
from treadle.agent_loop.errors import did_you_mean
from treadle.agent_loop.user_calls import call_user, result_of
from treadle.tools.rewards.time_limited import TimeLimitedReward
from treadle.tools.rewards.user import UserReward
from treadle.tracing import Metric, Reduce

__all__ = ["WeightedRewards", "short_name", "user_functions", "weighed"]

_TAKEN = ("acc", "accuracy", "max", "mean", "min", "overlong_penalty", "timeouts", "tool", "turn")
"""Metrics `reward/NAME` that are of all rewards, or have a meaning."""


def short_name(reference: str) -> str:
    """Returns the name of a reward in metrics and weights: `correct` of game.py:correct."""
    last = reference.rpartition(":")[2].removesuffix(".yaml").removesuffix(".yml")
    return last.rpartition("/")[2].rpartition(".")[2]


def user_functions(reward: object) -> Mapping[RewardFn, UserReward]:
    """Returns the user's functions that a reward calls, by what calls each."""
    if isinstance(reward, WeightedRewards):
        return {k: v for part in reward.parts.values() for k, v in user_functions(part).items()}
    function = reward.function if isinstance(reward, TimeLimitedReward) else reward
    return {reward: function} if isinstance(function, UserReward) else {}  # type: ignore[dict-item]


def weighed(
    given: Sequence[tuple[str, Callable[..., RewardFn]]], weights: Mapping[str, float]
) -> RewardFn:
    """Returns rewards as one; a single one that judges trajectories alone as it is.

    Args:
        given: References, and what makes the reward of each: called with `optional`, whether it may
            return None.
        weights: By short names; 1 where it has none.

    Raises:
        SetupError: Two rewards have one name, one has that of another metric, or a weight is of
            none of them.
    """
    several = len(given) > 1 or bool(weights)
    names = [short_name(reference) for reference, _ in given]
    if unknown := [name for name in weights if name not in names]:
        raise SetupError(
            f"reward.weights has {unknown[0]!r}, and no reward is named so"
            f"{did_you_mean(unknown[0], names)}; reward.name has: {', '.join(names) or 'none'}"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SetupError(
            f"two rewards are named {twice!r}, of {', '.join(each for each, _ in given)}, and each "
            "has a metric by its name: rename one"
        )
    made = {name: make(optional=several) for name, (_, make) in zip(names, given, strict=True)}
    found = WeightedRewards(made, weights)
    if not (several or found.compares):
        return made[names[0]]
    if taken := [name for name in names if name in _TAKEN]:
        raise SetupError(
            f"a reward is named {taken[0]!r}, of {', '.join(each for each, _ in given)}, and "
            f"reward/{taken[0]} is another metric: rename the function"
        )
    return found


class WeightedRewards(AbstractAsyncContextManager["WeightedRewards"]):
    """A `RewardFn` of several.

    Args:
        parts: By the short names of the rewards.
        weights: By the same names; 1 where it has none.
    """

    SUMMED = "rewards/summed"
    """Metric of a trajectory whose reward is a weighted sum: the number of results added. A sum of
    0 or 1 does not mean a wrong or right answer."""

    def __init__(self, parts: Mapping[str, RewardFn], weights: Mapping[str, float]) -> None:
        self.parts = parts
        self._weights = weights
        self._comparing = [
            name
            for name, part in parts.items()
            if any(function.of_group for function in user_functions(part).values())
        ]
        self._stack = AsyncExitStack()

    @property
    def compares(self) -> bool:
        """Whether one of them takes the trajectories of a whole group."""
        return bool(self._comparing)

    async def __aenter__(self) -> WeightedRewards:
        for part in self.parts.values():
            if isinstance(part, AbstractAsyncContextManager):
                await self._stack.enter_async_context(part)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Returns the sum of those that judge a trajectory alone; 0 if none of them does.

        Raises:
            RewardError: One failed, or all returned None and none compares.
        """
        scores = {
            name: await self._result(name, trajectory)
            for name in self.parts
            if name not in self._comparing
        }
        judged = {n: Score.of(each) for n, each in scores.items() if each is not None}
        if not judged and not self.compares:
            raise RewardError(_unjudged(trajectory, self.parts))
        return self._sum(judged)

    async def of_group(
        self, trajectories: Sequence[Trajectory], *, deadline_s: float
    ) -> list[Trajectory]:
        """Returns the trajectories of a row with the rewards of those that compare.

        Args:
            trajectories: All of the row; those that failed stay as they are.
            deadline_s: Time limit, after which they fail.
        """
        ended = tuple(t for t in trajectories if t.error is None)
        if not self.compares or not ended:
            return list(trajectories)
        given: dict[str, Sequence[Score | None]] = {}
        try:
            with boundary(RewardError, f"reward of the group of task {ended[0].task.task_id!r}"):
                async with asyncio.timeout(deadline_s) as limit:
                    for name in self._comparing:
                        given[name] = await self._result(name, ended)
                added = iter(
                    [
                        self._added(t, {name: scores[place] for name, scores in given.items()})
                        for place, t in enumerate(ended)
                    ]
                )
        except RolloutError as failed:
            error: RolloutError = failed
            if limit.expired():
                late = f"{failed}; it did not end within {deadline_s:g} s (agent.deadline_s)"
                error = TrajectoryTimeoutError(late)
                error.__cause__ = failed
            added = iter([Trajectory.failed(t.task, error) for t in ended])
        return [next(added) if t.error is None else t for t in trajectories]

    def _added(self, trajectory: Trajectory, given: Mapping[str, Score | None]) -> Trajectory:
        judged = {name: each for name, each in given.items() if each is not None}
        alone = {f"reward/{name}" for name in self.parts if name not in self._comparing}
        if not judged and not alone & {metric.name for metric in trajectory.metrics}:
            error = RewardError(_unjudged(trajectory, self.parts))
            return Trajectory.failed(trajectory.task, error)
        score = self._sum(judged)
        return trajectory.replaced(
            reward=(trajectory.reward or 0.0) + score.value,
            metrics=(*trajectory.metrics, *score.metrics),
            answer=score.answer if trajectory.answer is None else trajectory.answer,
        )

    async def _result(self, name: str, given: Any) -> Any:
        call = result_of if isinstance(given, Trajectory) else call_user
        return await call(f"the reward {name}", partial(self.parts[name], given))

    def _sum(self, judged: Mapping[str, Score]) -> Score:
        metrics = [
            metric
            for name, each in judged.items()
            for metric in (Metric(f"reward/{name}", each.value), *each.metrics)
        ]
        if len(self.parts) > 1 or any(weight != 1 for weight in self._weights.values()):
            metrics.append(Metric(self.SUMMED, float(len(judged)), Reduce.SUM))
        return Score(
            value=sum(self._weights.get(name, 1.0) * each.value for name, each in judged.items()),
            metrics=tuple(metrics),
            answer=next((s.answer for s in judged.values() if s.answer is not None), None),
        )


def _unjudged(trajectory: Trajectory, names: Mapping[str, object]) -> str:
    return (
        f"task {trajectory.task.task_id!r}: every reward returned None ({', '.join(names)}), and a "
        "trajectory needs a number of at least one"
    )
