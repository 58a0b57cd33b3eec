"""What the driver and a loop worker tell each other, and how trajectories and spans travel.

Invariants:

1. A worker asks for tasks (`Asks`) and is never given more than it asked for. Each task that it was
   given ends once, by `Ended`, unless its run or the worker ends first.
2. What travels twice otherwise is left out: an ended trajectory has neither its task nor the
   messages that the task began with; the driver has both.
3. Whatever a user's code puts into a trajectory, an `Ended` can be read by the driver, which may
   have none of the user's modules: a foreign error becomes the nearest of `agent_loop.errors`, and
   a trajectory that cannot be pickled becomes a failed one.
"""

import pickle
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from treadle.agent_loop import AgentTask, LoopError, Message, RolloutError, Trajectory
from treadle.agent_loop.rpc import Requirements
from treadle.tracing import FinishedSpan, SpanContext, SpanError, plain
from treadle.trainer.config.schema import Config
from treadle.trainer.policy.commands import Alive
from treadle.trainer.rollout.make_runner import RunnerSettings
from treadle.trainer.rollout.server_security import ServerSecurity

__all__ = [
    "Alive",
    "Asks",
    "Begin",
    "Bound",
    "End",
    "Ended",
    "FromDriver",
    "FromWorker",
    "Give",
    "GivenTask",
    "Ready",
    "Refused",
    "RunFailed",
    "Setup",
    "Stop",
    "Warned",
    "Weights",
    "WorkerLostError",
    "WorkerTraceback",
    "pack_spans",
    "pack_trajectory",
    "unpack_spans",
    "unpack_trajectory",
]

_ERRORS = "treadle.agent_loop.errors"
_LEFT_OUT = AgentTask(
    task_id="",
    sample_index=0,
    rollout_index=0,
    loop="",
    messages=(Message(role="user", content=""),),
)
"""Stands for the task of a packed trajectory."""
_SpanFields: TypeAlias = tuple[
    str, str, str, str | None, int, int, Mapping[str, object], tuple[str, str] | None
]


class WorkerLostError(RolloutError):
    """The loop worker of a trajectory was lost, as often as a task is attempted."""


class WorkerTraceback(Exception):
    """The traceback of an error in a worker, as text; the cause of the error in the driver."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message to a worker: what all of its runs have in common.

    Attributes:
        config: Of the run; its paths are the worker's too.
        router: host:port of the routing service.
        security: How the router and the servers are reached.
        requirements: What the servers must offer.
        loops: Names of the loops that run the rows.
        images: Whether rows may have images.
        directory: Working directory of the driver, from which relative paths are meant.
    """

    config: Config
    router: str
    security: ServerSecurity
    requirements: Requirements
    loops: frozenset[str]
    images: bool
    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A run begins: some tasks with the same settings.

    Attributes:
        run: Number of the run.
        settings: Of its tasks.
        max_in_flight: Maximum number of its tasks that this worker asks for at a time.
        recording: Whether spans are wanted.
        parent: The span that was open where the run was begun.
        attributes: Of all spans of the run.
    """

    run: int
    settings: RunnerSettings
    max_in_flight: int
    recording: bool
    parent: SpanContext | None
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class GivenTask:
    """One task for a worker.

    Attributes:
        number: Unique in its run.
        task: To run.
        attributes: Of its spans.
    """

    number: int
    task: AgentTask
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Give:
    """Tasks of a run, at most as many as the worker asked for."""

    run: int
    tasks: tuple[GivenTask, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """The maximum number of tasks of a run that the worker asks for at a time has changed."""

    run: int
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Calls that begin from now on may not be sampled from weights older than this version."""

    version: int


@dataclass(frozen=True, slots=True)
class End:
    """A run has ended: what is in flight of it is cancelled."""

    run: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker ends."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has everything it needs."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker cannot be set up, and ends.

    Attributes:
        message: What is wrong.
    """

    message: str


@dataclass(frozen=True, slots=True)
class Asks:
    """The worker has room for this many more tasks of a run."""

    run: int
    count: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A task has ended.

    Attributes:
        run: Of the task.
        number: Of the task.
        trajectory: See `pack_trajectory`.
        spans: What the run has recorded since its last message.
        asks: Number of tasks that the worker has room for, beyond what it asked for.
    """

    run: int
    number: int
    trajectory: bytes
    spans: tuple[_SpanFields, ...]
    asks: int


@dataclass(frozen=True, slots=True)
class RunFailed:
    """A run cannot continue: what is wrong is no matter of one trajectory."""

    run: int
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Warned:
    """A line of the worker's log that the user is to see.

    Attributes:
        level: Of `logging`.
        message: The line.
    """

    level: int
    message: str


FromDriver: TypeAlias = Setup | Begin | Give | Bound | Weights | End | Stop
FromWorker: TypeAlias = Alive | Ready | Refused | Asks | Ended | RunFailed | Warned


def pack_trajectory(trajectory: Trajectory, task: AgentTask) -> bytes:
    """Returns the trajectory of a task that was given, for `unpack_trajectory`."""
    error, text = trajectory.error, ""
    if error is not None:
        text = "".join(traceback.format_exception(error))
        trajectory = replace(trajectory, error=_portable(error))
    same = trajectory.task is task or trajectory.task == task
    kept = len(task.messages) if trajectory.messages[: len(task.messages)] == task.messages else 0
    light = replace(
        trajectory,
        task=_LEFT_OUT if same else trajectory.task,
        messages=trajectory.messages[kept:],
    )
    try:
        return pickle.dumps((light, same, kept, text), protocol=5)
    except Exception as problem:  # the user's objects may raise anything
        cause = LoopError(
            f"task {task.task_id!r}: its trajectory cannot leave the loop worker, because it "
            f"cannot be pickled: {type(problem).__name__}: {problem}"
        )
        light = replace(Trajectory.failed(_LEFT_OUT, cause), messages=())
        return pickle.dumps((light, True, len(task.messages), ""), protocol=5)


def unpack_trajectory(packed: bytes, task: AgentTask) -> Trajectory:
    """Returns the trajectory that was packed, of the same task."""
    trajectory: Trajectory
    trajectory, same, kept, text = pickle.loads(packed)
    if trajectory.error is not None and text:
        trajectory.error.__cause__ = WorkerTraceback(text)
    return replace(
        trajectory,
        task=task if same else trajectory.task,
        messages=(*task.messages[:kept], *trajectory.messages),
    )


def _portable(error: RolloutError) -> RolloutError:
    """Returns the error, or one of this package's with its text, if the driver may not have it."""
    known = next(kind for kind in type(error).__mro__ if kind.__module__ == _ERRORS)
    if type(error) is known or type(error) is WorkerLostError:
        return error
    plainer: RolloutError = known(f"{type(error).__name__}: {error}")
    plainer.__dict__.update({k: v for k, v in vars(error).items() if k in ("tool", "__notes__")})
    plainer.retryable = error.retryable
    return plainer


def pack_spans(spans: Iterable[FinishedSpan]) -> tuple[_SpanFields, ...]:
    """Returns spans in a form that can be pickled; what is expensive in them is computed."""
    return tuple(
        (
            span.name,
            span.trace_id,
            span.span_id,
            span.parent_id,
            span.start_unix_ns,
            span.duration_ns,
            {key: plain(value) for key, value in span.attributes.items()},
            None if span.error is None else (span.error.type, span.error.message),
        )
        for span in spans
    )


def unpack_spans(packed: Iterable[_SpanFields]) -> Iterable[FinishedSpan]:
    """Yields the spans that were packed."""
    for name, trace_id, span_id, parent_id, start, duration, attributes, error in packed:
        yield FinishedSpan(
            name=name,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            start_unix_ns=start,
            duration_ns=duration,
            attributes=MappingProxyType(dict(attributes)),
            error=None if error is None else SpanError(type=error[0], message=error[1]),
        )
