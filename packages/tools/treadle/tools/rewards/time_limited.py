"""A reward in a separate process: text of a model may keep a reward busy forever.

Invariant: a trajectory gets the reward's result, its error, or the `timeout_score` with a warning
that names the line; the metric `reward/timeouts` counts the last where there is a limit.
`treadle.agent_loop.time_limited` runs the function.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from treadle.agent_loop import RewardError, RewardFn, Score, Trajectory
from treadle.agent_loop.time_limited import TimeLimited, TimeLimitedError
from treadle.tracing import Metric, Reduce

_PROCESSES, _MOST_PROCESSES = 2, 32

_log = logging.getLogger(__name__)


class TimeLimitedReward:
    """A `RewardFn` around another one.

    Args:
        make: Makes the reward in the separate process; picklable.
        timeout_s: Seconds that one trajectory may take. None: until its caller is cancelled.
        timeout_score: Score of a trajectory that takes longer.

    Raises:
        ValueError: `timeout_s` is not above 0.
    """

    def __init__(
        self,
        make: Callable[[], RewardFn],
        *,
        name: str,
        timeout_s: float | None,
        timeout_score: float = 0.0,
    ) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._timeout_score = timeout_score
        self._reward: TimeLimited[Trajectory, float | Score] = TimeLimited(
            make,
            name=f"reward {name}",
            timeout_s=math.inf if timeout_s is None else timeout_s,
            processes=_PROCESSES,
            most=_MOST_PROCESSES,
        )

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Scores a trajectory.

        Raises:
            RewardError: The reward raised, or its process died.
        """
        timeouts = 0
        try:
            score = Score.of(await self._reward(trajectory))
        except TimeLimitedError as error:
            raise RewardError(f"the reward {self._name}: {error}") from error
        except TimeoutError as error:
            _log.warning(
                "task %s: the reward %s did not end within %g s; the trajectory gets %g; %s",
                trajectory.task.task_id,
                self._name,
                self._timeout_s,
                self._timeout_score,
                error,
            )
            score, timeouts = Score(value=self._timeout_score), 1
        if self._timeout_s is None:
            return score
        count = Metric("reward/timeouts", timeouts, Reduce.SUM)
        return replace(score, metrics=(*score.metrics, count))
