"""Tests of the checks on a completion's stream."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import ContractError, FinishReason, RoutedExperts, SamplingParams
from treadle.agent_loop.rpc.completion_stream import CompletionStream
from treadle.agent_loop.rpc.testing import prompt_logprobs
from treadle.rollout.v1 import generation_service_pb2 as pb

STARTED = pb.GenerateResponse(started=pb.GenerateStarted())


def chunk(*ids: int, version: int = 3, logprobs: int | None = None) -> pb.GenerateResponse:
    count = len(ids) if logprobs is None else logprobs
    return pb.GenerateResponse(
        tokens=pb.TokenChunk(token_ids=ids, logprobs=[-1.0] * count, weight_version=version)
    )


def end(count: int, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> pb.GenerateResponse:
    return pb.GenerateResponse(finished=pb.GenerateFinished(reason=reason, num_tokens=count))


def stream(
    asked_experts: RoutedExperts | None = None,
    *,
    num_prompt_logprobs: int = 0,
    sampling_mask: bool = False,
) -> CompletionStream:
    return CompletionStream(
        address="h:1",
        params=SamplingParams(max_tokens=4, stop_token_ids=(9,), sampling_mask=sampling_mask),
        vocab_size=10,
        min_weight_version=3,
        num_prompt_tokens=5,
        asked_experts=asked_experts,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def routed(*ids: int, experts: bytes) -> pb.GenerateResponse:
    event = chunk(*ids)
    event.tokens.routed_experts = experts
    return event


ROWS = RoutedExperts(first=3, num_layers=1, top_k=2, id_bytes=1, data=b"")


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([chunk(1)], "tokens came before started"),
        ([end(0)], "finished came before started"),
        ([STARTED, STARTED], "started came twice"),
        ([STARTED, chunk(1), end(2)], "1 tokens came, finished says 2"),
        ([STARTED, chunk(1), end(1), chunk(2)], "tokens came after finished"),
        ([STARTED, chunk(1, 2, logprobs=1)], "2 tokens came with 1 logprobs"),
        ([STARTED, chunk()], "holds no token"),
        ([STARTED, chunk(10)], "token 10 is outside the vocabulary of 10"),
        ([STARTED, chunk(1, version=2)], "weight version 2 sampled where 3"),
        ([STARTED, chunk(1, 2, 3), chunk(4, 5)], "more than max_tokens=4"),
        ([STARTED, chunk(9, 1)], "token 1 was sampled after the stop id 9"),
        ([STARTED, chunk(9), chunk(1)], "token 1 was sampled after the stop id 9"),
        ([STARTED, end(0)], "finished says stop, and no token came"),
        ([STARTED, chunk(1), end(1, pb.FINISH_REASON_UNSPECIFIED)], "unknown reason 0"),
        ([STARTED, chunk(1, logprobs=1)], "without finished"),
    ],
)
def test_broken_promises_are_named(events: list[pb.GenerateResponse], problem: str) -> None:
    reader = stream()
    with pytest.raises(ContractError, match=problem):
        for event in events:
            reader.accept(event)
        reader.end()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
def test_logprobs_are_numbers_of_probabilities(value: float) -> None:
    reader = stream()
    reader.accept(STARTED)
    event = pb.GenerateResponse(
        tokens=pb.TokenChunk(token_ids=[1], logprobs=[value], weight_version=3)
    )
    with pytest.raises(ContractError, match="logprob"):
        reader.accept(event)


def test_an_event_of_a_newer_server_is_passed_over() -> None:
    reader = stream()
    for event in (STARTED, pb.GenerateResponse(), chunk(9), end(1)):
        reader.accept(event)
    assert reader.end() is FinishReason.STOP


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4), max_size=3))
def test_any_grouping_of_the_tokens_gives_the_same_ids(groups: list[list[int]]) -> None:
    ids = [i for group in groups for i in group]
    reader = CompletionStream(
        address="h:1",
        params=SamplingParams(max_tokens=max(1, len(ids))),
        vocab_size=10,
        min_weight_version=0,
    )
    reader.accept(STARTED)
    for group in groups:
        reader.accept(chunk(*group))
    reader.accept(end(len(ids), pb.FINISH_REASON_LENGTH))
    assert reader.end() is FinishReason.LENGTH
    assert [i for c in reader.chunks for i in c.token_ids] == ids


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_events_that_come_in_batches_are_read_as_if_alone(sizes: list[int]) -> None:
    events = [STARTED, chunk(1), chunk(2, 3), end(3, pb.FINISH_REASON_LENGTH)]
    reader = stream()
    for size in [*sizes, len(events)]:
        batch = pb.GenerateBatch()
        for event in events[:size]:
            batch.MergeFrom(as_batch(event))
        reader.accept(pb.GenerateResponse(batch=batch))
        events = events[size:]
    assert reader.end() is FinishReason.LENGTH
    assert [c.token_ids for c in reader.chunks] == [(1,), (2, 3)]


def as_batch(event: pb.GenerateResponse) -> pb.GenerateBatch:
    match event.WhichOneof("event"):
        case "started":
            return pb.GenerateBatch(started=event.started)
        case "tokens":
            return pb.GenerateBatch(tokens=[event.tokens])
        case _:
            return pb.GenerateBatch(finished=event.finished)


def test_a_batch_breaks_no_promise() -> None:
    reader = stream()
    with pytest.raises(ContractError, match="tokens came before started"):
        reader.accept(pb.GenerateResponse(batch=pb.GenerateBatch(tokens=[chunk(1).tokens])))


def test_experts_may_come_before_and_after_their_tokens() -> None:
    reader = stream(ROWS)
    events = (STARTED, routed(experts=b"ab"), routed(1, experts=b"cd"), chunk(2))
    for event in (*events, routed(experts=b"efgh"), routed(9, experts=b""), end(3)):
        reader.accept(event)
    experts = reader.routed_experts()
    assert experts is not None
    assert (experts.first, experts.stop, experts.data) == (3, 7, b"abcdefgh")


@pytest.mark.parametrize(
    ("asked", "events", "problem"),
    [
        (None, [routed(1, experts=b"ab")], "experts came that were not asked for"),
        (ROWS, [routed(1, experts=b"a")], "1 bytes of experts came; a row has 2"),
        (ROWS, [chunk(9), end(1)], "the experts of 0 rows came, 2 were asked for"),
        (ROWS, [routed(9, experts=b"abcdef"), end(1)], "of 3 rows came, 2 were asked for"),
    ],
)
def test_experts_are_those_that_were_asked_for(
    asked: RoutedExperts | None, events: list[pb.GenerateResponse], problem: str
) -> None:
    reader = stream(asked)
    reader.accept(STARTED)
    with pytest.raises(ContractError, match=problem):
        for event in events:
            reader.accept(event)


@pytest.mark.parametrize(
    ("asked", "came", "problem"),
    [(True, 0, "0 sampling masks came with 2 tokens, not 2"), (False, 2, "2 .*tokens, not 0")],
)
def test_sampling_masks_are_those_that_were_asked_for(asked: bool, came: int, problem: str) -> None:
    reader, event = stream(sampling_mask=asked), chunk(1, 2)
    event.tokens.sampling_masks.extend([b"\x03"] * came)
    reader.accept(STARTED)
    with pytest.raises(ContractError, match=problem):
        reader.accept(event)
    event.tokens.ClearField("sampling_masks")
    event.tokens.sampling_masks.extend([b"\x03", b""] if asked else [])
    reader.accept(event)
    assert reader.chunks[0].sampling_masks == ((b"\x03", b"") if asked else ())


def test_a_stream_that_breaks_off_keeps_the_experts_of_its_tokens() -> None:
    """Rows of tokens that did not arrive belong to nothing."""
    reader = stream(ROWS)
    for event in (STARTED, routed(experts=b"abcdefgh"), chunk(1)):
        reader.accept(event)
    experts = reader.routed_experts()
    assert experts is not None
    assert (experts.stop, experts.data) == (6, b"abcdef")


def test_logprobs_of_the_prompt_come_before_its_tokens_alone_and_in_a_batch() -> None:
    alone, batched = stream(num_prompt_logprobs=3), stream(num_prompt_logprobs=3)
    parts = [prompt_logprobs(-1.0, -2.0), prompt_logprobs(-0.5)]
    for event in (STARTED, *parts, chunk(9), end(1)):
        alone.accept(event)
    batch = pb.GenerateBatch(
        started=STARTED.started,
        prompt_logprobs=[part.prompt_logprobs for part in parts],
        tokens=[chunk(9).tokens],
        finished=end(1).finished,
    )
    batched.accept(pb.GenerateResponse(batch=batch))
    assert alone.prompt_logprobs == batched.prompt_logprobs == [-1.0, -2.0, -0.5]
    assert alone.end() is batched.end() is FinishReason.STOP


@pytest.mark.parametrize(
    ("asked", "events", "problem"),
    [
        (0, [prompt_logprobs(-1.0)], "1 log-probabilities of the prompt came, 0 were asked for"),
        (2, [prompt_logprobs(-1.0, -1.0, -1.0)], "3 log-probabilities of the prompt came, 2"),
        (2, [prompt_logprobs(-1.0), chunk(1)], "a token came after 1 of 2 log-probabilities"),
        (1, [prompt_logprobs(math.nan)], "a logprob is nan"),
        (1, [prompt_logprobs(-1.0), chunk(1), prompt_logprobs(-1.0)], "came after a token"),
    ],
)
def test_logprobs_of_the_prompt_are_those_that_were_asked_for(
    asked: int, events: list[pb.GenerateResponse], problem: str
) -> None:
    reader = stream(num_prompt_logprobs=asked)
    reader.accept(STARTED)
    with pytest.raises(ContractError, match=problem):
        for event in events:
            reader.accept(event)
