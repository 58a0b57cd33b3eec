"""A reward with a time limit: text of a model may keep a reward busy forever.

Invariant: a trajectory gets the reward's result, its error, or the `timeout_score` with a warning;
the metric `reward/timeouts` counts the last. `treadle.tools.time_limited` runs the function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from treadle.agent_loop import RewardError, RewardFn, Score, Trajectory
from treadle.tools.time_limited import TimeLimited, TimeLimitedError
from treadle.tracing import Metric, Reduce

_PROCESSES = 2

_log = logging.getLogger(__name__)


class TimeLimitedReward:
    """A `RewardFn` around another one.

    Args:
        make: Makes the reward in the separate process; picklable.
        timeout_s: Seconds that one trajectory may take.
        timeout_score: What a trajectory that takes longer gets.

    Raises:
        ValueError: `timeout_s` is not above 0.
    """

    def __init__(
        self,
        make: Callable[[], RewardFn],
        *,
        name: str,
        timeout_s: float,
        timeout_score: float = 0.0,
    ) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._timeout_score = timeout_score
        self._reward: TimeLimited[Trajectory, float | Score] = TimeLimited(
            make, name=f"reward {name}", timeout_s=timeout_s, processes=_PROCESSES
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
        except TimeoutError:
            _log.warning(
                "task %s: the reward %s did not end within %g s; the trajectory gets %g",
                trajectory.task.task_id,
                self._name,
                self._timeout_s,
                self._timeout_score,
            )
            score, timeouts = Score(value=self._timeout_score), 1
        count = Metric("reward/timeouts", timeouts, Reduce.SUM)
        return replace(score, metrics=(*score.metrics, count))
