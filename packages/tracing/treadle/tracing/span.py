"""A span: one named, timed piece of work, nested in the span that was open when it began.

Invariant: a span is recorded exactly once, when it closes, as an immutable `FinishedSpan`; what
its attributes held at that moment is what a sink sees, however late it writes. Lists given as
attributes are copied, so a caller may keep changing its own.

Where spans go is a property of the context, not of the call site: `use_sink` installs a sink for
the tasks and calls below it. Nobody waits here and nobody is woken: closing a span calls
`sink.record`, which must return at once. With the default `NullSink` a span costs one context
variable look-up and allocates nothing, so code is instrumented unconditionally.

    with use_sink(JsonlSink(path)):
        async with span("turn", index=3) as turn:
            completion = await generate()
            turn.set(tokens=len(completion.token_ids))
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from types import MappingProxyType, TracebackType
from typing import Final, Protocol, Self

from treadle.tracing.finished import Deferred, FinishedSpan, SpanContext, SpanError
from treadle.tracing.sink import NullSink, TraceSink, record_safely


class SpanHandle(Protocol):
    """An open span. Entered with `with` or `async with`, once."""

    @property
    def recording(self) -> bool:
        """False if the attributes are thrown away: then none needs to be computed."""
        ...

    def set(self, **attributes: object) -> None:
        """Adds or replaces attributes: plain data is copied, other objects become their text."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None: ...


_NULL_SINK: Final = NullSink()
_sink: ContextVar[TraceSink] = ContextVar("treadle_trace_sink", default=_NULL_SINK)
_parent: ContextVar[SpanContext | None] = ContextVar("treadle_trace_parent", default=None)
_NO_ATTRIBUTES: Final[Mapping[str, object]] = MappingProxyType({})
_shared: ContextVar[Mapping[str, object]] = ContextVar(
    "treadle_trace_attributes", default=_NO_ATTRIBUTES
)

_SCALARS: Final = (str, int, float, Deferred)
_IMMUTABLE: Final = frozenset({type(None), bool, *_SCALARS})

# Not the module-level generator of `random`: a traced run must draw the same numbers as an
# untraced one. A forked child must not repeat its parent's ids.
_ids: Final = random.Random()
os.register_at_fork(after_in_child=_ids.seed)


def span(name: str, /, **attributes: object) -> SpanHandle:
    """Opens a span below the current one, for use with `with` or `async with`.

    Args:
        name: Name of the operation, from a small fixed set ("turn", "tool"); the rest belongs in
            the attributes.
        **attributes: Known at the start; more can be added with `SpanHandle.set`.

    Returns:
        The handle to enter. An exception that leaves the block is recorded and propagates.
    """
    sink = _sink.get()
    if not sink.recording:
        return NULL_SPAN
    return _LiveSpan(sink, name, attributes)


def record_span(
    name: str,
    /,
    *,
    start_unix_ns: int,
    duration_ns: int,
    error: SpanError | None = None,
    context: SpanContext | None = None,
    **attributes: object,
) -> None:
    """Records a span that has ended and was timed elsewhere, below the current one.

    Args:
        start_unix_ns: Wall-clock time of its start, in ns.
        context: Its identity, from `new_context` of the current span, if it has children. None:
            a new one.
    """
    sink = _sink.get()
    if not sink.recording:
        return
    parent = _parent.get()
    context = context or new_context(parent)
    own = {key: freeze(value) for key, value in attributes.items()}
    finished = FinishedSpan(
        name=name,
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_id=parent.span_id if parent is not None else None,
        start_unix_ns=start_unix_ns,
        duration_ns=duration_ns,
        attributes=MappingProxyType({**_shared.get(), **own}),
        error=error,
    )
    record_safely(sink, finished)


@contextmanager
def use_sink(sink: TraceSink) -> Iterator[None]:
    """Sends the spans of this block, and of the tasks started in it, to `sink`."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


@contextmanager
def use_parent(parent: SpanContext | None) -> Iterator[None]:
    """Nest the spans of this block below `parent`, which may live in another process."""
    token = _parent.set(parent)
    try:
        yield
    finally:
        _parent.reset(token)


@contextmanager
def use_attributes(**attributes: object) -> Iterator[None]:
    """Adds attributes to all spans of this block, and of the tasks started in it.

    A span's own attribute of the same name takes precedence.
    """
    frozen = {key: freeze(value) for key, value in attributes.items()}
    token = _shared.set(MappingProxyType({**_shared.get(), **frozen}))
    try:
        yield
    finally:
        _shared.reset(token)


def current_sink() -> TraceSink:
    """Returns the sink installed by the innermost `use_sink`, else a `NullSink`."""
    return _sink.get()


def current_span() -> SpanContext | None:
    """Returns the identity of the innermost recorded span, or None outside of any."""
    return _parent.get()


def current_attributes() -> Mapping[str, object]:
    """Returns what `use_attributes` adds to the spans here."""
    return _shared.get()


class _NullSpan:
    """The one span handed out while nothing records. Stateless, so it may be entered many times."""

    __slots__ = ()
    recording: Final = False

    def set(self, **attributes: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None:
        pass


NULL_SPAN: Final = _NullSpan()


class _LiveSpan:
    """A span that will be recorded in the sink that was current when it was made."""

    __slots__ = (
        "_attributes",
        "_context",
        "_name",
        "_parent_id",
        "_sink",
        "_start",
        "_start_unix",
        "_token",
    )

    def __init__(self, sink: TraceSink, name: str, attributes: Mapping[str, object]) -> None:
        self._sink = sink
        self._name = name
        own = {key: freeze(value) for key, value in attributes.items()}
        self._attributes = {**_shared.get(), **own}
        self._token: Token[SpanContext | None] | None = None

    @property
    def recording(self) -> bool:
        return True

    def set(self, **attributes: object) -> None:
        for key, value in attributes.items():
            self._attributes[key] = freeze(value)

    def __enter__(self) -> Self:
        assert self._token is None, f"span {self._name!r} entered twice"
        parent = _parent.get()
        self._parent_id = parent.span_id if parent is not None else None
        self._context = new_context(parent)
        self._token = _parent.set(self._context)
        self._start_unix = time.time_ns()
        self._start = time.perf_counter_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None:
        duration = time.perf_counter_ns() - self._start
        assert self._token is not None, f"span {self._name!r} closed before it was entered"
        # ValueError: closed in another context than it was opened in, as happens to an async
        # generator that the event loop finalizes; this context never had the span as its parent.
        with suppress(ValueError):
            _parent.reset(self._token)
        finished = FinishedSpan(
            name=self._name,
            trace_id=self._context.trace_id,
            span_id=self._context.span_id,
            parent_id=self._parent_id,
            start_unix_ns=self._start_unix,
            duration_ns=duration,
            attributes=MappingProxyType(dict(self._attributes)),
            error=None if error is None else SpanError.of(error),
        )
        record_safely(self._sink, finished)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None:
        self.__exit__(kind, error, tb)


def new_context(parent: SpanContext | None) -> SpanContext:
    """Returns the identity of a new span below `parent`, or of the root of a new trace."""
    return SpanContext(
        trace_id=parent.trace_id if parent is not None else new_id(128), span_id=new_id(64)
    )


def new_id(bits: int) -> str:
    """Returns a random non-zero identifier of `bits` bits as lower-case hexadecimal digits."""
    return f"{_ids.getrandbits(bits) or 1:0{bits // 4}x}"


def freeze(value: object) -> object:
    """Copies `value` so that later changes of it do not reach a span: plain data only."""
    if type(value) in _IMMUTABLE:  # Ten times faster than the checks below, and the usual case.
        return value
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, Mapping):
        return MappingProxyType({str(key): freeze(item) for key, item in value.items()})
    return str(value)
