import pytest
from google.protobuf.duration_pb2 import Duration

from treadle.agent_loop import SamplingParams
from treadle.agent_loop.rpc.completion_stream import CompletionStream
from treadle.agent_loop.rpc.phase_spans import record_phases
from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.tracing import MemorySink, span, use_sink


def seconds(value: float) -> Duration:
    return Duration(nanos=round(value * 1e9))


def ended(**times: Duration) -> CompletionStream:
    """A completion of one token that waited 0.1 s and took 0.8 s in the engine."""
    stream = CompletionStream(
        address="h:1", params=SamplingParams(max_tokens=1), vocab_size=10, min_weight_version=0
    )
    stream.accept(pb.GenerateResponse(started=pb.GenerateStarted(queue_time=seconds(0.1))))
    stream.accept(
        pb.GenerateResponse(tokens=pb.TokenChunk(token_ids=[1], logprobs=[-1.0], weight_version=0))
    )
    finished = pb.GenerateFinished(
        reason=pb.FINISH_REASON_LENGTH, num_tokens=1, engine_time=seconds(0.8), **times
    )
    stream.accept(pb.GenerateResponse(finished=finished))
    return stream


def recorded(stream: CompletionStream) -> list[tuple[str, float, float]]:
    """Names, seconds from the end of the last span to the start of each, and lengths."""
    with use_sink(sink := MemorySink()), span("generate"):
        record_phases(stream, call=2)
    *phases, whole = sink.spans
    assert {phase.parent_id for phase in phases} <= {whole.span_id}
    for phase in phases:
        assert phase.attributes == {"server": "h:1", "call": 2}
    end = max(phase.start_unix_ns + phase.duration_ns for phase in phases)
    return [
        (phase.name, (end - phase.start_unix_ns) / 1e9, phase.duration_ns / 1e9) for phase in phases
    ]


def test_the_phases_follow_one_another_and_a_pause_is_within_them() -> None:
    phases = recorded(ended(prefill_time=seconds(0.3), paused_time=seconds(0.2)))
    assert [name for name, _, _ in phases] == ["queue", "prefill", "decode", "paused"]
    assert [begun for _, begun, _ in phases] == pytest.approx([0.9, 0.8, 0.5, 0.2])
    assert [length for _, _, length in phases] == pytest.approx([0.1, 0.3, 0.5, 0.2])


def test_without_a_pause_there_is_no_span_of_one() -> None:
    phases = recorded(ended(prefill_time=seconds(0.8), paused_time=seconds(0)))
    assert [name for name, _, _ in phases] == ["queue", "prefill", "decode"]


def test_of_an_older_server_only_the_queue_is_known() -> None:
    assert [name for name, _, _ in recorded(ended())] == ["queue"]
