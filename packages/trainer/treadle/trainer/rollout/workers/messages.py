"""What the messages between driver and loop workers hold, beside trajectories.

The messages themselves are in `proto/treadle/loop_worker/v1`. Settings travel as JSON of their
classes, since both sides are of one release.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

from pydantic import ConfigDict, TypeAdapter

from treadle.agent_loop import AgentTask
from treadle.agent_loop.rpc import Requirements
from treadle.loop_worker.v1 import loop_worker_service_pb2 as pb
from treadle.loop_worker.v1 import trajectory_pb2
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.tracing import FinishedSpan, SpanError, plain
from treadle.trainer.config.schema import Config
from treadle.trainer.rollout.make_runner import RunnerSettings
from treadle.trainer.rollout.workers.plain_values import from_wire, to_wire
from treadle.trainer.rollout.workers.stored_text import to_json
from treadle.trainer.rollout.workers.trajectory_codec import (
    ImageNumbers,
    pack_task,
    read_images,
    read_task,
)

__all__ = [
    "RUNNER_SETTINGS",
    "WORKER_SETTINGS",
    "GivenTask",
    "WorkerSettings",
    "attributes_json",
    "pack_given",
    "pack_spans",
    "read_attributes",
    "read_given",
    "read_spans",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What all runs of a worker have in common.

    Attributes:
        config: Its paths are the worker's, too.
        router: host:port of the routing service.
        response_characters: Maximum length of a `response` in the trajectory files, whose text the
            worker makes (`Give.text`).
        directory: Working directory of the driver, from which relative paths are meant.
    """

    __pydantic_config__: ClassVar = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    config: Config
    router: str
    security: ServerSecurity
    requirements: Requirements
    loops: frozenset[str]
    images: bool
    response_characters: int
    directory: Path


WORKER_SETTINGS: Final = TypeAdapter(WorkerSettings)
RUNNER_SETTINGS: Final = TypeAdapter(RunnerSettings)


@dataclass(frozen=True, slots=True)
class GivenTask:
    """One task for a worker.

    Attributes:
        number: A number that is unique in its run.
        attributes: Plain values, for each of its spans.
    """

    number: int
    task: AgentTask
    attributes: Mapping[str, object]


def pack_given(given: GivenTask, number: ImageNumbers) -> pb.GivenTask:
    """Returns a task for `read_given`.

    Args:
        number: Numbers the images of all tasks of the message.

    Raises:
        NotPlainError, ValueError: As `pack_task`.
    """
    return pb.GivenTask(
        number=given.number,
        task=pack_task(given.task, number),
        attributes=attributes_json(given.attributes),
    )


def read_given(give: pb.Give) -> list[GivenTask]:
    """Returns the tasks of a message."""
    images = read_images(give.images, {})
    return [
        GivenTask(each.number, read_task(each.task, images), read_attributes(each.attributes))
        for each in give.tasks
    ]


def attributes_json(attributes: Mapping[str, object]) -> bytes:
    """Returns the attributes of a span as JSON; what is expensive in them is computed."""
    return to_wire(to_json({key: plain(value) for key, value in attributes.items()}))


def read_attributes(text: bytes) -> dict[str, Any]:
    """Returns the attributes of which `attributes_json` returned the JSON."""
    read: dict[str, Any] = json.loads(from_wire(text))
    return read


def pack_spans(spans: Iterable[FinishedSpan], into: Any) -> None:
    """Adds spans to a field of a message."""
    for span in spans:
        error = span.error
        into.add(
            name=to_wire(span.name),
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_id=span.parent_id,
            start_unix_ns=span.start_unix_ns,
            duration_ns=span.duration_ns,
            attributes=attributes_json(span.attributes),
            error=None
            if error is None
            else trajectory_pb2.SpanError(type=to_wire(error.type), message=to_wire(error.message)),
        )


def read_spans(packed: Iterable[trajectory_pb2.FinishedSpan]) -> Iterable[FinishedSpan]:
    """Yields the spans that were packed."""
    for span in packed:
        error = span.error
        yield FinishedSpan(
            name=from_wire(span.name),
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_id=span.parent_id if span.HasField("parent_id") else None,
            start_unix_ns=span.start_unix_ns,
            duration_ns=span.duration_ns,
            attributes=MappingProxyType(read_attributes(span.attributes)),
            error=SpanError(type=from_wire(error.type), message=from_wire(error.message))
            if span.HasField("error")
            else None,
        )
