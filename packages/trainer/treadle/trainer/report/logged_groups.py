"""The groups of a trajectory log that the report shows: evenly chosen, and read alone.

Invariant: memory holds the chosen lines without ids, not the log, which grows to gigabytes. A log
that is being written is read up to its last whole line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

T = TypeVar("T")
Line = dict[str, Any]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Number = Annotated[float, Field(ge=-1e308, le=1e308)]  # JSON has integers that are no float.


class _Shape(BaseModel):
    """The part of a line of `TrajectoryLog` that the report reads; there may be more."""

    model_config = ConfigDict(strict=True)


class _Call(_Shape):
    name: str
    arguments: dict[str, Any]


class _Message(_Shape):
    role: str
    content: Any
    tool_calls: list[_Call] | None = None


class _TokenSpan(_Shape):
    origin: str
    start: int
    stop: int
    text: str | None


class _Sample(_Shape):
    ids: list[Any]
    spans: list[_TokenSpan]


class _TraceSpan(_Shape):
    name: str
    start_unix_ns: _Count
    duration_ns: _Count
    error: str | None


class _Finding(_Shape):
    kind: str
    text: str


class _Trajectory(_Shape):
    rollout_index: _Count
    stop: str
    messages: list[_Message]
    reward: _Number | None = None
    advantage: _Number | None = None
    error: str | None = None
    traceback: str | None = None
    samples: list[_Sample] | None = None
    findings: list[_Finding] | None = None
    trace: list[_TraceSpan] | None = None
    metrics: dict[str, _Number | None] | None = None


# As `TrajectoryLog` begins a line; any other line is parsed whole.
_BEGIN = re.compile(rb'\{"step": (\d+), "phase": "(\w+)", "task_id": ("(?:[^"\\]|\\.)*"), ')


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGroup:
    """The logged trajectories of one row in one step, as lines of the log."""

    step: int
    phase: str
    task_id: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGroups:
    """The part of a log that is shown.

    Attributes:
        groups: The chosen ones, in the order of the log.
    """

    groups: tuple[LoggedGroup, ...] = ()
    num_groups: int = 0
    num_trajectories: int = 0


def read_groups(path: Path, *, max_trajectories: int) -> LoggedGroups:
    """Returns whole groups with at most `max_trajectories` together.

    They are spread evenly over the run. Validation gets at most a third; only a group that is
    larger than all that may be shown is cut.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is damaged; the text names it.
    """
    with path.open("rb") as file:
        index = _index(file, path)
        val = [key for key in index if key[1] == "val"]
        train = [key for key in index if key[1] != "val"]
        limit = max_trajectories if not train else max_trajectories // 3
        chosen = _choose(val, index, limit)
        used = sum(len(index[key]) for key in chosen)
        chosen += _choose(train, index, max_trajectories - used)
        return LoggedGroups(
            groups=tuple(
                LoggedGroup(
                    step=key[0],
                    phase=key[1],
                    task_id=key[2],
                    lines=tuple(
                        _line_at(file, start, path) for start in index[key][:max_trajectories]
                    ),
                )
                for key in sorted(chosen, key=lambda key: index[key][0])
            ),
            num_groups=len(index),
            num_trajectories=sum(len(starts) for starts in index.values()),
        )


def without_ids(line: Line) -> Line:
    """Returns a line of the log with the number of tokens in the place of their ids.

    As Python objects, ids and log-probabilities take most of the memory, and nobody reads them.
    """
    samples = [
        {"num_tokens": len(sample["ids"]), "spans": sample["spans"]}
        for sample in line.get("samples") or []
    ]
    return {**line, "samples": samples}


def thin_out(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of them, evenly from the first to the last, in their order."""
    count = len(items)
    if count <= limit:
        return list(items)
    if limit <= 1:
        return list(items[count - limit :])
    return [items[i * (count - 1) // (limit - 1)] for i in range(limit)]


_Key = tuple[int, str, str]


def _index(file: BinaryIO, path: Path) -> dict[_Key, list[int]]:
    index: dict[_Key, list[int]] = {}
    start = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            break
        index.setdefault(_key(line, number, path), []).append(start)
        start += len(line)
    return index


def _key(line: bytes, number: int, path: Path) -> _Key:
    try:
        if begin := _BEGIN.match(line):
            return int(begin[1]), begin[2].decode(), json.loads(begin[3])
        value = json.loads(line)
        return int(value["step"]), str(value["phase"]), str(value["task_id"])
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number} is damaged: {error!r}") from error


def _choose(keys: Sequence[_Key], index: dict[_Key, list[int]], limit: int) -> list[_Key]:
    count = len(keys)
    while True:
        chosen = thin_out(keys, count)
        if count <= 1 or sum(len(index[key]) for key in chosen) <= limit:
            return chosen
        count = count * 9 // 10


def _line_at(file: BinaryIO, start: int, path: Path) -> Line:
    file.seek(start)
    where = f"{path}, the line at byte {start} is damaged"
    try:
        value = json.loads(file.readline())
        _Trajectory.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "line"
        raise ValueError(f"{where}: {place:.80}: {first['msg']}") from error
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return without_ids(value)
