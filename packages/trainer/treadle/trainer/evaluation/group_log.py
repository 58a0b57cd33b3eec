"""Writes each row's trajectories as soon as the last of them has ended.

Invariant: `trajectories.jsonl` holds whole groups, so that an evaluation that is interrupted keeps
what it has finished.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from treadle.agent_loop import Trajectory
from treadle.tracing import Fanout, FinishedSpan, current_sink, use_sink
from treadle.trainer.report import TrajectoryLog
from treadle.trainer.report.trajectories import outline

__all__ = ["GroupLog"]

Key = tuple[object, object]


class GroupLog:
    """Collects trajectories into groups, and the spans of each.

    Args:
        samples: Number of trajectories of a group.
        step: The step of the weights.
    """

    def __init__(self, log: TrajectoryLog, *, samples: int, step: int) -> None:
        self._log = log
        self._samples = samples
        self._step = step
        self._groups: dict[str, list[Trajectory]] = {}
        self._spans = _SpansByTask()

    @contextmanager
    def recording(self) -> Iterator[Self]:
        """Keeps what is traced in this block, beside where it goes anyway, for the log."""
        with use_sink(Fanout(current_sink(), self._spans)):
            yield self

    def add(self, trajectory: Trajectory) -> None:
        """Takes a trajectory that has ended; writes its group if it is the last of it.

        Raises:
            OSError: The disk is full or gone.
        """
        task_id = trajectory.task.task_id
        group = self._groups.setdefault(task_id, [])
        group.append(trajectory)
        if len(group) < self._samples:
            return
        del self._groups[task_id]
        group.sort(key=lambda each: each.task.rollout_index)
        keys = [(task_id, each.task.rollout_index) for each in group]
        spans = [span for key in keys for span in self._spans.take(key)]
        self._log.append(self._step, group, phase="val", limit=len(group), spans=spans)


class _SpansByTask:
    """A sink that keeps spans until their task's are taken; each attempt is a separate trace."""

    def __init__(self) -> None:
        self._traces: dict[str, list[FinishedSpan]] = {}
        self._attempts: dict[Key, list[str]] = {}

    @property
    def recording(self) -> bool:
        """Always True."""
        return True

    def record(self, span: FinishedSpan) -> None:
        """Keeps `span`."""
        self._traces.setdefault(span.trace_id, []).append(outline(span))
        if span.name == "trajectory":
            key = (span.attributes.get("task_id"), span.attributes.get("rollout_index"))
            self._attempts.setdefault(key, []).append(span.trace_id)

    def take(self, key: Key) -> Sequence[FinishedSpan]:
        """Returns the spans of a task's attempts, and forgets them."""
        attempts = self._attempts.pop(key, [])
        return [span for trace_id in attempts for span in self._traces.pop(trace_id, [])]
