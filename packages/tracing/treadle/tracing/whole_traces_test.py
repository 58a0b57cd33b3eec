from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from treadle.tracing import FinishedSpan
from treadle.tracing.whole_traces import WholeTraces


def make_span(trace: int, number: int, *, root: bool) -> FinishedSpan:
    return FinishedSpan(
        name="turn",
        trace_id=f"{trace:032x}",
        span_id=f"{number:016x}",
        parent_id=None if root else "f" * 16,
        start_unix_ns=1,
        duration_ns=1,
        attributes={},
        error=None,
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans())), st.integers(1, 4))
def test_every_span_leaves_once_with_its_trace(
    arriving: list[tuple[int, bool]], limit: int
) -> None:
    traces = WholeTraces(limit)
    spans = [make_span(trace, n, root=root) for n, (trace, root) in enumerate(arriving, start=1)]
    left = [trace for span in spans for trace in traces.add(span)]
    rest = list(traces.rest())
    assert len(rest) <= limit
    assert all(len({span.trace_id for span in trace}) == 1 for trace in left + rest)
    assert Counter(span.span_id for trace in left + rest for span in trace) == Counter(
        span.span_id for span in spans
    )
    assert not list(traces.rest())


def test_a_trace_is_complete_with_its_root() -> None:
    traces = WholeTraces()
    child, other = make_span(1, 1, root=False), make_span(2, 2, root=False)
    root = make_span(1, 3, root=True)
    assert [*traces.add(child), *traces.add(other)] == []
    assert list(traces.add(root)) == [[child, root]]
    assert list(traces.rest()) == [[other]]
