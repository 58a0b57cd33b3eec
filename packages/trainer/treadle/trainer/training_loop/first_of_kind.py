"""The first failure and the first finding of each kind, which are shown at once.

The metrics count them all. The traceback of a failure that is shown goes to the log.
"""

import logging
from collections.abc import Iterator, Sequence

from treadle.agent_loop import Trajectory
from treadle.trainer.report.failures import FirstFailures, whole_traceback

__all__ = ["FirstOfKind"]

_log = logging.getLogger(__name__)


class FirstOfKind:
    """Remembers the kinds of failures and findings of a run."""

    def __init__(self) -> None:
        self._failures = FirstFailures()
        self._findings: set[str] = set()

    def take(self, trajectories: Sequence[Trajectory]) -> Iterator[str]:
        """Yields a text for each failure and each finding of a new kind, failures first.

        A failure's text ends with the line of the user's code, where there is one.
        """
        for trajectory, code in self._failures.take(trajectories):
            task, error = trajectory.task, trajectory.error
            assert error is not None, "only failures are taken"
            text = (
                f"first {type(error).__name__} of its kind, in {task.task_id}, rollout "
                f"{task.rollout_index}: {error}"
            )
            yield f"{text}\n{code}" if code else text
            _log.info("its traceback:\n%s", whole_traceback(error))
        for trajectory in trajectories:
            for finding in trajectory.findings:
                if finding.kind not in self._findings:
                    self._findings.add(finding.kind)
                    task = trajectory.task
                    yield (
                        f"first {finding.kind} of the run, in {task.task_id}, rollout "
                        f"{task.rollout_index}: {finding.text}"
                    )
