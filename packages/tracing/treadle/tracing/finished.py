"""A finished span: what is known of a piece of work once it has ended.

Invariant: immutable data that does not change after the span has ended, so that a sink may keep it
and write it at any later time, on any thread. `plain` gives a sink what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

INPUTS: Final = "inputs"
"""The attribute with what the work was given: a mapping of names to values."""
OUTPUT: Final = "output"
"""The attribute with what the work returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanContext:
    """The identity by which another span, here or in another process, names its parent.

    `trace_id` is 32 and `span_id` 16 lower-case hexadecimal digits, neither all zero (W3C Trace
    Context, section 3.2.2).
    """

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanError:
    """The exception that left a span: the name of its type and its text."""

    type: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> SpanError:
        """Describes `error` and keeps nothing else of it."""
        return cls(type=type(error).__qualname__, message=str(error))


@dataclass(frozen=True, slots=True)
class Deferred:
    """The value of an attribute that is expensive, computed by `plain` when a sink writes it.

    Attributes:
        compute: Returns plain data. It is called on the sink's thread, perhaps more than once, and
            must not depend on anything that changes.
    """

    compute: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSpan:
    """A closed span. `parent_id` is None for the root of a trace; `error` is None if none left it.

    The attributes `inputs` and `output` hold the work's arguments and result; some services show
    them apart from the others.

    `start_unix_ns` is wall-clock time, for placing spans of several hosts on one line;
    `duration_ns` is measured on the monotonic clock.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_unix_ns: int
    duration_ns: int
    attributes: Mapping[str, object]
    error: SpanError | None

    @property
    def end_unix_ns(self) -> int:
        """Wall-clock time of the end: the start and the duration."""
        return self.start_unix_ns + self.duration_ns


def plain(value: object) -> object:
    """Returns the value of an attribute as dictionaries, lists and scalars, for a sink to write.

    Raises:
        Exception: A `Deferred` value could not be computed.
    """
    if isinstance(value, Deferred):
        return plain(value.compute())
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
