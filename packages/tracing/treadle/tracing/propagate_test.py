import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.tracing import MemorySink, SpanContext, extract, inject, span, use_parent, use_sink

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_span_here_is_the_parent_there() -> None:
    with use_sink(here := MemorySink()), span("call"):
        metadata = (("x-token", "secret"), *inject())
    with use_sink(there := MemorySink()), use_parent(extract(metadata)), span("handle"):
        pass
    assert there.spans[0].trace_id == here.spans[0].trace_id
    assert there.spans[0].parent_id == here.spans[0].span_id


def test_nothing_is_sent_while_nothing_records() -> None:
    with span("call"):
        assert inject() == ()


def test_the_example_of_the_recommendation_is_read() -> None:
    parent = extract([("Traceparent", f"00-{TRACE}-{SPAN}-01")])
    assert parent == SpanContext(trace_id=TRACE, span_id=SPAN)


def test_a_later_version_with_more_fields_is_read() -> None:
    assert extract([("traceparent", f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like")])


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-extra",
        f"00-{TRACE}-{SPAN}-00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}{SPAN}-01",
    ],
)
def test_what_is_malformed_or_not_sampled_is_absent(header: str) -> None:
    assert extract([("traceparent", header)]) is None


def test_a_header_given_twice_or_as_bytes_is_absent() -> None:
    header = f"00-{TRACE}-{SPAN}-01"
    assert extract([("traceparent", header), ("traceparent", header)]) is None
    assert extract([("traceparent", header.encode())]) is None
    assert extract([]) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.just("traceparent") | st.text(), st.text() | st.binary())))
def test_no_metadata_raises(metadata: list[tuple[str, str | bytes]]) -> None:
    extract(metadata)
