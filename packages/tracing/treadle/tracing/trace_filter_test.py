import logging

import pytest

from treadle.tracing import (
    MemorySink,
    TraceFilter,
    TraceSampler,
    current_sink,
    span,
    use_attributes,
    use_sink,
)


def make_filter(
    sink: MemorySink,
    *,
    rate: float = 1.0,
    max_samples: int | None = None,
    max_bytes: int | None = None,
    bytes_per_span: int = 0,
) -> TraceFilter:
    return TraceFilter(
        sink,
        TraceSampler(rate=rate),
        max_samples=max_samples,
        max_bytes=max_bytes,
        bytes_written=lambda: len(sink.spans) * bytes_per_span,
    )


def trajectory(index: int, *, stop: str = "answer", step: int = 1, validate: bool = False) -> None:
    with (
        use_attributes(step=step, sample_index=index, validate=validate),
        span("trajectory") as root,
    ):
        with span("turn"):
            pass
        root.set(stop=stop)


def traced(sink: MemorySink) -> list[object]:
    """Returns the samples whose whole trace has arrived, in order; nothing else may have."""
    names = [span.name for span in sink.spans]
    assert names == ["turn", "trajectory"] * (len(names) // 2)
    return [span.attributes["sample_index"] for span in sink.spans if span.name == "trajectory"]


def test_the_chosen_and_the_failed_are_traced_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sink = MemorySink()
    some = make_filter(sink, rate=0.3)
    with use_sink(some):
        for index in range(100):
            trajectory(index)
        trajectory(1000, stop="error")
        with (
            pytest.raises(ValueError),
            use_attributes(step=1, sample_index=1001),
            span("trajectory"),
            span("turn"),
        ):
            raise ValueError
        assert current_sink().recording
    chosen = [index for index in range(100) if TraceSampler(rate=0.3).wants(1, index)]
    assert 0 < len(chosen) < 100
    assert traced(sink) == [*chosen, 1000, 1001]
    some.close()
    assert f"{len(chosen) + 2} trajectories are traced, {100 - len(chosen)} were not" in caplog.text


def test_a_limited_number_of_samples_per_step_with_all_their_trajectories() -> None:
    sink = MemorySink()
    some = make_filter(sink, max_samples=2)
    with use_sink(some):
        for step in (1, 2):
            some.expect(step, range(10), validate=False)
            for index in [*range(10), *range(10)]:
                trajectory(index, step=step)
        some.expect(2, range(10, 20), validate=False)  # more rows for the same step
        trajectory(15, step=2)
        some.expect(2, [3], validate=True)
        trajectory(3, step=2, validate=True)
    indices = traced(sink)
    assert [len(set(indices[:4])), len(set(indices[4:8]))] == [2, 2]
    assert indices[8:] == [3]


def test_after_the_budget_only_failures_are_traced(caplog: pytest.LogCaptureFixture) -> None:
    sink = MemorySink()
    some = make_filter(sink, max_bytes=60, bytes_per_span=10)
    with use_sink(some):
        for index in range(6):
            trajectory(index)
        trajectory(6, stop="error")
    assert traced(sink) == [0, 1, 2, 6]
    some.close()
    warnings = [r.getMessage() for r in caplog.records]
    assert warnings == [
        "60 bytes of traces are written at step 1, the budget: from now on only failed "
        "trajectories are traced",
        "traces: 4 trajectories are traced, 0 were not chosen, 3 were left out for the budget",
    ]


def test_what_is_no_trajectory_is_always_traced() -> None:
    sink = MemorySink()
    none = make_filter(sink, rate=0.0)
    with use_sink(none), use_attributes(step=1), span("update"):
        pass
    assert [span.name for span in sink.spans] == ["update"]


def test_an_open_trace_is_passed_on_at_the_end() -> None:
    sink = MemorySink()
    none = make_filter(sink, rate=0.0)
    with use_sink(none), use_attributes(step=1, sample_index=1), span("trajectory"):
        with span("turn"):
            pass
        none.close()
        assert [span.name for span in sink.spans] == ["turn"]
