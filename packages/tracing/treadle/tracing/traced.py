"""The decorator `traced`: every call of a function is a span.

Invariant: the decorated function returns, yields and raises what the function does. Without a sink
it costs one look-up. The span is named as the function is written, `Class.method`; `inputs` holds
the arguments by their names without `self`, `output` what was returned.

An async generator is suspended in its consumer's context at every `yield`, so its span is the
current one only while its own code runs. Nobody waits here that would not wait without the
decorator.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, ParamSpec, TypeVar

from treadle.tracing.finished import SpanError
from treadle.tracing.span import (
    current_sink,
    current_span,
    freeze,
    new_context,
    record_span,
    span,
    use_parent,
)

P = ParamSpec("P")
R = TypeVar("R")


def traced(function: Callable[P, R]) -> Callable[P, R]:
    """Makes every call of a function a span, with its arguments, its result and its exception.

    Args:
        function: A function or method, plain or `async`, or an async generator. Put the decorator
            below `@staticmethod`, `@classmethod` and `@property`.

    Returns:
        The function. The output of an async generator is the list of what it yielded.

    Raises:
        TypeError: It is no function, or a plain generator, whose work is spread over its
            consumer's time.
    """
    if not inspect.isfunction(function):
        raise TypeError(
            f"@traced takes a function, got {function!r:.80}: put it below @staticmethod, "
            "@classmethod or @property, directly above the function"
        )
    if inspect.isgeneratorfunction(function):
        raise TypeError(
            f"@traced does not take the generator {function.__qualname__}: make it async, or trace "
            "the functions that it calls"
        )
    call = _Call(function)
    if inspect.isasyncgenfunction(function):
        return call.async_generator()
    if inspect.iscoroutinefunction(function):
        return call.coroutine()
    return call.plain()


class _Call:
    """The ways to call one function below a span, as functions that look like it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = function.__qualname__.rpartition("<locals>.")[2]
        self._signature = inspect.signature(function)
        first = next(iter(self._signature.parameters), None)
        # A method's first parameter, by Python's two conventions for its name.
        self._hidden = first if "." in self._name and first in ("self", "cls") else None

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, object]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return {}  # The call is about to raise the same.
        bound.apply_defaults()
        return {key: value for key, value in bound.arguments.items() if key != self._hidden}

    def plain(self) -> Callable[..., Any]:
        @functools.wraps(self._function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not current_sink().recording:
                return self._function(*args, **kwargs)
            with span(self._name, inputs=self._inputs(args, kwargs)) as trace:
                output = self._function(*args, **kwargs)
                trace.set(output=output)
                return output

        return call

    def coroutine(self) -> Callable[..., Any]:
        @functools.wraps(self._function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            if not current_sink().recording:
                return await self._function(*args, **kwargs)
            async with span(self._name, inputs=self._inputs(args, kwargs)) as trace:
                output = await self._function(*args, **kwargs)
                trace.set(output=output)
                return output

        return call

    def async_generator(self) -> Callable[..., Any]:
        @functools.wraps(self._function)
        async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            recording, outer = current_sink().recording, current_span()
            inner = new_context(outer) if recording else outer
            inputs = freeze(self._inputs(args, kwargs)) if recording else None
            began_unix, began = time.time_ns(), time.perf_counter_ns()
            items: list[object] = []
            failure: SpanError | None = None
            try:
                async with aclosing(self._function(*args, **kwargs)) as source:
                    sent: Any = None
                    while True:
                        with use_parent(inner):
                            try:
                                item = await source.asend(sent)
                            except StopAsyncIteration:
                                return
                        if recording:
                            items.append(freeze(item))
                        sent = yield item
            except GeneratorExit:
                raise  # The consumer has seen enough.
            except BaseException as error:
                failure = SpanError.of(error)
                raise
            finally:
                with use_parent(outer):
                    record_span(
                        self._name,
                        start_unix_ns=began_unix,
                        duration_ns=time.perf_counter_ns() - began,
                        error=failure,
                        context=inner,
                        inputs=inputs,
                        output=items,
                    )

        return call
