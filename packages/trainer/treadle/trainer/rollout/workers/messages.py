"""The messages between the driver and a loop worker, and how spans travel.

Invariants:

1. A worker asks for tasks (`Asks`) and is never given more than it asked for. Each task that it was
   given ends once, by `Ended`, unless its run or the worker ends first.
2. A trajectory is packed by itself (`trajectory_frames`), so that one that cannot be pickled fails
   alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from treadle.agent_loop import AgentTask
from treadle.agent_loop.rpc import Requirements
from treadle.policy.client.signs_of_life import Alive
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.tracing import FinishedSpan, SpanContext, SpanError, plain
from treadle.trainer.config.schema import Config
from treadle.trainer.rollout.make_runner import RunnerSettings
from treadle.trainer.rollout.workers.trajectory_frames import PackedTrajectory

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
    "pack_spans",
    "unpack_spans",
]

_SpanFields: TypeAlias = tuple[
    str, str, str, str | None, int, int, Mapping[str, object], tuple[str, str] | None
]


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
        response_characters: Maximum length of a `response` in the trajectory files, whose text the
            worker makes (`Give.text`).
        directory: Working directory of the driver, from which relative paths are meant.
    """

    config: Config
    router: str
    security: ServerSecurity
    requirements: Requirements
    loops: frozenset[str]
    images: bool
    response_characters: int
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
    """Tasks of a run, at most as many as the worker asked for.

    Attributes:
        run: Of the tasks.
        tasks: To run.
        text: Whether the worker makes the text of trajectories that end from now on, for the
            trajectory files; else few are stored, and the driver makes it of these.
    """

    run: int
    tasks: tuple[GivenTask, ...]
    text: bool


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
    trajectory: PackedTrajectory
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
