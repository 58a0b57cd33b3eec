import pytest

from treadle.tracing import Fanout, FinishedSpan, MemorySink, NullSink, span, use_sink


class Broken:
    recording = True

    def record(self, span: FinishedSpan) -> None:
        raise RuntimeError("no disk")


def test_a_fanout_gives_every_span_to_every_sink_even_past_a_broken_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = MemorySink(), MemorySink()
    with use_sink(Fanout(first, Broken(), NullSink(), second)), span("a"):
        pass
    assert [s.name for s in first.spans] == [s.name for s in second.spans] == ["a"]
    assert "Broken.record raised" in caplog.text


def test_a_fanout_records_only_if_one_of_its_sinks_does() -> None:
    assert not Fanout().recording
    assert not Fanout(NullSink()).recording
    assert Fanout(NullSink(), MemorySink()).recording
