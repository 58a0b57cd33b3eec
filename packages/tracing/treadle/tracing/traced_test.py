"""The decorator: names, arguments, results, exceptions, and async generators among them."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

import pytest

from treadle.tracing import MemorySink, current_span, inject, plain, span, traced, use_sink


@pytest.fixture
def sink() -> Iterator[MemorySink]:
    with use_sink(sink := MemorySink()):
        yield sink


class Search:
    def __init__(self) -> None:
        self.query = "before"

    @traced
    def rank(self, query: str, *, limit: int = 2, boost: dict[str, int] | None = None) -> list[str]:
        """Ranks."""
        return [query] * limit

    @traced
    async def fetch(self, *names: str) -> dict[str, int]:
        async with span("inside"):
            await asyncio.sleep(0)
        return {name: len(name) for name in names}

    @traced
    async def stream(self, count: int) -> AsyncGenerator[int, int | None]:
        for number in range(count):
            with span("piece"):
                pass
            got = yield number
            if got is not None:
                yield 100 + got

    @classmethod
    @traced
    def make(cls, kind: str) -> "Search":
        return cls()


@traced
def divide(a: int, b: int) -> float:
    return a / b


def test_a_method_is_named_with_its_class_and_keeps_its_face(sink: MemorySink) -> None:
    boost = {"a": 1}
    assert Search().rank("x", boost=boost) == ["x", "x"]
    boost["a"] = 2
    (call,) = sink.spans
    assert call.name == "Search.rank"
    assert plain(call.attributes) == {
        "inputs": {"query": "x", "limit": 2, "boost": {"a": 1}},
        "output": ["x", "x"],
    }
    assert (Search.rank.__name__, Search.rank.__doc__) == ("rank", "Ranks.")


def test_the_class_of_a_class_method_is_no_input(sink: MemorySink) -> None:
    Search.make("fast")
    assert plain(sink.spans[0].attributes["inputs"]) == {"kind": "fast"}


@pytest.mark.asyncio
async def test_a_coroutine_has_its_own_spans_below_it(sink: MemorySink) -> None:
    assert await Search().fetch("a", "bc") == {"a": 1, "bc": 2}
    inside, call = sink.spans
    assert inside.parent_id == call.span_id
    assert plain(call.attributes) == {
        "inputs": {"names": ["a", "bc"]},
        "output": {"a": 1, "bc": 2},
    }


def test_an_exception_is_recorded_and_leaves(sink: MemorySink) -> None:
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    (call,) = sink.spans
    assert call.name == "divide"
    assert call.error is not None and call.error.type == "ZeroDivisionError"
    assert "output" not in call.attributes


def test_arguments_that_do_not_fit_raise_what_the_function_raises(sink: MemorySink) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        divide(1)  # type: ignore[call-arg]


@pytest.mark.asyncio
async def test_an_async_generator_is_current_only_while_it_runs(sink: MemorySink) -> None:
    with span("consumer"):
        consumer = current_span()
        assert consumer is not None
        async for _number in Search().stream(2):
            assert current_span() == consumer
            with span("use"):
                pass
    stream = next(found for found in sink.spans if found.name == "Search.stream")
    assert stream.parent_id == consumer.span_id
    assert plain(stream.attributes) == {"inputs": {"count": 2}, "output": [0, 1]}
    assert {s.parent_id for s in sink.spans if s.name == "piece"} == {stream.span_id}
    assert {s.parent_id for s in sink.spans if s.name == "use"} == {consumer.span_id}


@pytest.mark.asyncio
async def test_an_async_generator_takes_what_is_sent_and_ends_early(sink: MemorySink) -> None:
    source = Search().stream(5)
    assert await anext(source) == 0
    assert await source.asend(7) == 107
    await source.aclose()
    (stream,) = (found for found in sink.spans if found.name == "Search.stream")
    assert stream.error is None
    assert plain(stream.attributes["output"]) == [0, 107]


@pytest.mark.asyncio
async def test_an_async_generator_records_what_it_raises(sink: MemorySink) -> None:
    @traced
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        async for _ in broken():
            pass
    (call,) = sink.spans
    assert call.name == "broken"
    assert call.error is not None and call.error.message == "two"


@pytest.mark.asyncio
async def test_nothing_is_recorded_and_no_parent_is_sent_without_a_sink() -> None:
    assert Search().rank("x") == ["x", "x"]
    assert await Search().fetch() == {}
    async for _ in Search().stream(1):
        assert inject() == ()


def test_what_cannot_be_traced_is_refused() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="make it async"):
        traced(numbers)
    with pytest.raises(TypeError, match="put it below @staticmethod"):
        traced(staticmethod(divide))
