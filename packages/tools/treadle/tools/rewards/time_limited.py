"""A reward in a separate process: text of a model may keep a reward busy forever.

Invariant: a trajectory gets the reward's result, its error, or the `timeout_score` with a warning
that names the line; the metric `reward/timeouts` counts the last where there is a limit.
`treadle.agent_loop.time_limited` runs the function.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from treadle.agent_loop import RewardError, Score, Trajectory
from treadle.agent_loop.time_limited import TimeLimited, TimeLimitedError
from treadle.tracing import Metric, Reduce

_PROCESSES, _MOST_PROCESSES = 2, 32

_log = logging.getLogger(__name__)


class TimeLimitedReward:
    """A reward around another one, of a trajectory or of a whole group.

    Args:
        make: Makes the reward in the separate process; picklable.
        function: The reward as it was made in this process.
        timeout_s: Seconds that one trajectory may take. None: until its caller is cancelled.
        timeout_score: Score of a trajectory that takes longer.

    Raises:
        ValueError: `timeout_s` is not above 0.
    """

    def __init__(
        self,
        make: Callable[[], Callable[..., Any]],
        *,
        name: str,
        timeout_s: float | None,
        timeout_score: float = 0.0,
        function: object = None,
    ) -> None:
        self.function = function
        self._name = name
        self._timeout_s = timeout_s
        self._timeout_score = timeout_score
        self._reward: TimeLimited[Trajectory | Sequence[Trajectory], Any] = TimeLimited(
            make,
            name=f"reward {name}",
            timeout_s=math.inf if timeout_s is None else timeout_s,
            processes=_PROCESSES,
            most=_MOST_PROCESSES,
        )

    def try_now(self, given: Trajectory | Sequence[Trajectory], *, limit_s: float) -> None:
        """Calls the reward once, and ends its process; what takes longer than the limit is left.

        Raises:
            RewardError: The reward raised, or its process died.
        """
        try:
            self._reward.call_now(given, limit_s)
        except TimeLimitedError as error:
            raise RewardError(f"the reward {self._name}: {error}") from error
        except TimeoutError:
            return
        finally:
            self._reward.end_idle()

    async def __call__(self, given: Trajectory | Sequence[Trajectory]) -> Any:
        """Returns the result for a trajectory, or a list of those of a group.

        Raises:
            RewardError: The reward raised, or its process died.
        """
        group = (given,) if isinstance(given, Trajectory) else given
        several = group is given
        timeouts = 0
        try:
            results = await self._reward(given)
        except TimeLimitedError as error:
            raise RewardError(f"the reward {self._name}: {error}") from error
        except TimeoutError as error:
            _log.warning(
                "task %s: the reward %s did not end within %g s; %s %g; %s",
                group[0].task.task_id,
                self._name,
                self._timeout_s,
                "each trajectory of the group gets" if several else "the trajectory gets",
                self._timeout_score,
                error,
            )
            late = Score(value=self._timeout_score)
            results, timeouts = [late] * len(group) if several else late, 1
        if self._timeout_s is None:
            return results
        count = Metric("reward/timeouts", timeouts, Reduce.SUM)
        counted = [
            None if score is None else replace(score, metrics=(*score.metrics, count))
            for score in (results if several else [results])
        ]
        return counted if several else counted[0]
