import asyncio
import contextvars
import random
from collections.abc import Iterator
from types import MappingProxyType

import pytest

from treadle.tracing import (
    Deferred,
    FinishedSpan,
    MemorySink,
    NullSink,
    SpanContext,
    current_sink,
    current_span,
    plain,
    record_span,
    span,
    use_attributes,
    use_parent,
    use_sink,
)


@pytest.fixture
def sink() -> Iterator[MemorySink]:
    with use_sink(sink := MemorySink()):
        yield sink


def by_name(sink: MemorySink) -> dict[str, FinishedSpan]:
    return {finished.name: finished for finished in sink.spans}


def test_a_span_carries_its_name_attributes_and_times(sink: MemorySink) -> None:
    with span("turn", index=3, name="shadow") as turn:
        turn.set(tokens=5, index=4)
    (finished,) = sink.spans
    assert finished.name == "turn"
    assert finished.attributes == {"index": 4, "name": "shadow", "tokens": 5}
    assert finished.duration_ns >= 0
    assert finished.start_unix_ns > 1_700_000_000 * 10**9
    assert finished.error is None


def test_spans_nest_and_children_close_first(sink: MemorySink) -> None:
    with span("outer"):
        with span("inner"):
            pass
        with span("second"):
            pass
    assert [finished.name for finished in sink.spans] == ["inner", "second", "outer"]
    spans = by_name(sink)
    assert spans["outer"].parent_id is None
    assert spans["inner"].parent_id == spans["second"].parent_id == spans["outer"].span_id
    assert len({finished.trace_id for finished in sink.spans}) == 1
    assert current_span() is None


def test_two_roots_are_two_traces(sink: MemorySink) -> None:
    with span("a"):
        pass
    with span("b"):
        pass
    assert sink.spans[0].trace_id != sink.spans[1].trace_id


@pytest.mark.asyncio
async def test_tasks_started_in_a_span_nest_below_it_and_not_in_each_other(
    sink: MemorySink,
) -> None:
    both_open = asyncio.Barrier(2)

    async def work(name: str) -> None:
        async with span(name):
            await both_open.wait()

    async with span("parent"), asyncio.TaskGroup() as group:
        group.create_task(work("left"))
        group.create_task(work("right"))
    spans = by_name(sink)
    assert spans["left"].parent_id == spans["right"].parent_id == spans["parent"].span_id


@pytest.mark.asyncio
async def test_attributes_of_a_block_are_of_its_spans_and_those_of_its_tasks(
    sink: MemorySink,
) -> None:
    async def work() -> None:
        with span("task"):
            pass

    with use_attributes(step=3, validate=False):
        with use_attributes(step=4), span("inner"):
            task = asyncio.create_task(work())
        with span("own", step=5):
            pass
    await task
    with span("outside"):
        pass
    spans = by_name(sink)
    assert spans["inner"].attributes == {"step": 4, "validate": False}
    assert spans["task"].attributes == {"step": 4, "validate": False}
    assert spans["own"].attributes == {"step": 5, "validate": False}
    assert spans["outside"].attributes == {}


def test_an_exception_is_recorded_and_goes_on(sink: MemorySink) -> None:
    with pytest.raises(KeyError), span("turn"):
        raise KeyError("missing")
    (finished,) = sink.spans
    assert finished.error is not None
    assert (finished.error.type, finished.error.message) == ("KeyError", "'missing'")
    assert current_span() is None


@pytest.mark.asyncio
async def test_a_cancelled_span_is_recorded(sink: MemorySink) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        async with span("turn"):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (finished,) = sink.spans
    assert finished.error is not None
    assert finished.error.type == "CancelledError"


def test_lists_are_copied_so_later_appends_do_not_reach_the_span(sink: MemorySink) -> None:
    ids = [1, 2]
    nested = {"ids": [3]}
    with span("turn", ids=ids, nested=nested) as turn:
        turn.set(more=ids)
        ids.append(99)
        nested["ids"].append(99)
    (finished,) = sink.spans
    assert finished.attributes["ids"] == finished.attributes["more"] == (1, 2)
    assert finished.attributes["nested"] == {"ids": (3,)}
    assert isinstance(finished.attributes, MappingProxyType)


def test_objects_become_text_so_a_sink_never_holds_live_state(sink: MemorySink) -> None:
    with span("turn", where=SpanContext(trace_id="a", span_id="b")):
        pass
    assert sink.spans[0].attributes["where"] == "SpanContext(trace_id='a', span_id='b')"


def test_without_a_sink_no_span_is_built() -> None:
    assert isinstance(current_sink(), NullSink)
    handle = span("turn", index=1)
    assert handle is span("other")
    with handle as entered, handle:
        entered.set(ignored=True)
        assert current_span() is None


@pytest.mark.asyncio
async def test_the_null_span_is_also_asynchronous() -> None:
    async with span("turn") as turn:
        turn.set(ignored=True)


def test_the_sink_is_that_of_the_innermost_block(sink: MemorySink) -> None:
    with use_sink(inner := MemorySink()), span("a"):
        pass
    with use_sink(NullSink()), span("b"):
        pass
    with span("c"):
        pass
    assert [finished.name for finished in inner.spans] == ["a"]
    assert [finished.name for finished in sink.spans] == ["c"]


def test_a_span_nests_below_a_parent_from_elsewhere(sink: MemorySink) -> None:
    parent = SpanContext(trace_id="ab" * 16, span_id="cd" * 8)
    with use_parent(parent), span("here"):
        pass
    assert (sink.spans[0].trace_id, sink.spans[0].parent_id) == (parent.trace_id, parent.span_id)


def test_a_broken_sink_is_blamed_once_and_does_not_end_the_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        recording = True

        def record(self, span: FinishedSpan) -> None:
            raise RuntimeError("no disk")

    with use_sink(Broken()):
        with span("a"):
            pass
        with pytest.raises(ValueError, match="the real one"), span("b"):
            raise ValueError("the real one")
    (said,) = caplog.records
    assert "Broken.record raised" in said.getMessage()


def test_tracing_does_not_disturb_the_random_numbers_of_the_program(sink: MemorySink) -> None:
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    drawn = []
    for _ in range(3):
        with span("turn"):
            drawn.append(random.random())
    assert drawn == expected


def test_a_span_closed_in_another_context_is_still_recorded(sink: MemorySink) -> None:
    handle = span("generator")
    contextvars.copy_context().run(handle.__enter__)
    handle.__exit__(None, None, None)
    assert [finished.name for finished in sink.spans] == ["generator"]


def test_a_span_that_was_timed_elsewhere_is_recorded_below_the_current_one(
    sink: MemorySink,
) -> None:
    with use_attributes(step=1), span("call"):
        record_span("queue", start_unix_ns=5, duration_ns=7, tokens=[1])
    queue, call = sink.spans
    assert (queue.start_unix_ns, queue.duration_ns, queue.error) == (5, 7, None)
    assert (queue.trace_id, queue.parent_id) == (call.trace_id, call.span_id)
    assert queue.attributes == {"step": 1, "tokens": (1,)}


def test_a_deferred_attribute_is_computed_when_it_is_written(sink: MemorySink) -> None:
    computed: list[str] = []

    def compute() -> dict[str, object]:
        computed.append("now")
        return {"ids": (1, 2)}

    with span("call", output={"text": Deferred(compute)}) as call:
        assert call.recording
    assert computed == []
    assert plain(sink.spans[0].attributes) == {"output": {"text": {"ids": [1, 2]}}}
    assert computed == ["now"]


def test_a_span_without_a_sink_does_not_record() -> None:
    assert not span("call").recording
    record_span("queue", start_unix_ns=0, duration_ns=0)
