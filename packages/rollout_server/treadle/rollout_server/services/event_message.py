"""Encodes events of an engine as messages of Generate.

Each function returns one serialized `GenerateResponse`, which goes to gRPC as bytes. Fields are
passed as dictionaries, which protobuf reads twice as fast as messages made for them: the three
messages of a short completion are a tenth of its cost to the server.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout_server.engine import (
    EngineEvent,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    Tokens,
)

MAX_REPORT_BYTES = 1 << 20
"""Maximum size of routed experts, of sampling masks, or of log-probabilities, in a message; gRPC
takes 4 MiB."""

_LOGPROB_BYTES = 4

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.INTERRUPTED: pb.FINISH_REASON_INTERRUPTED,
}


class Numbers(TypedDict):
    """Numbers that the server adds to events.

    Attributes:
        engine_s: Seconds in the engine so far.
        prefill_s: Seconds before the first token.
        paused_s: Seconds in which sampling was paused.
        num_tokens: Number of tokens so far.
    """

    queue_s: float
    engine_s: float
    prefill_s: float
    paused_s: float
    num_tokens: int


def encode_event(event: EngineEvent, numbers: Numbers) -> bytes:
    """Encodes one event, with the numbers for which its message has fields."""
    name, fields = _fields(event, numbers)
    return _serialized({name: fields})


def encode_batch(events: Sequence[EngineEvent], numbers: Numbers) -> bytes:
    """Encodes events that are ready together, in order; only for requests with `batched`."""
    batch: dict[str, Any] = {}
    for event in events:
        name, fields = _fields(event, numbers)
        if name in ("tokens", "prompt_logprobs"):
            batch.setdefault(name, []).append(fields)
        else:
            batch[name] = fields
    return _serialized({"batch": batch})


def split_report(event: EngineEvent, row_bytes: int) -> Iterator[EngineEvent]:
    """Yields an event in parts, each with at most `MAX_REPORT_BYTES` of a kind of report.

    Args:
        event: Any event. Of tokens with many routed experts the last parts have the tokens.
    """
    if report_bytes([event]) <= MAX_REPORT_BYTES:
        yield event
    elif isinstance(event, Tokens):
        step = MAX_REPORT_BYTES - MAX_REPORT_BYTES % row_bytes
        *before, last = range(0, max(1, len(event.routed_experts)), step)
        for first in before:
            rows = event.routed_experts[first : first + step]
            yield Tokens((), (), event.weight_version, rows)
        yield from _split_masks(replace(event, routed_experts=event.routed_experts[last:]))
    elif isinstance(event, PromptLogprobs):
        step = MAX_REPORT_BYTES // _LOGPROB_BYTES
        for first in range(0, len(event.logprobs), step):
            yield replace(event, logprobs=event.logprobs[first : first + step])


def _split_masks(event: Tokens) -> Iterator[Tokens]:
    """Yields tokens in parts whose sampling masks are short enough; the first has the experts."""
    first = size = 0
    routed = event.routed_experts
    for index, mask in enumerate(event.sampling_masks):
        if size and size + len(mask) > MAX_REPORT_BYTES:
            yield replace(_part(event, first, index), routed_experts=routed)
            first, size, routed = index, 0, b""
        size += len(mask)
    yield replace(_part(event, first, len(event.token_ids)), routed_experts=routed)


def _part(event: Tokens, first: int, last: int) -> Tokens:
    part = slice(first, last)
    return replace(
        event,
        token_ids=event.token_ids[part],
        logprobs=event.logprobs[part],
        sampling_masks=event.sampling_masks[part],
    )


def report_bytes(events: Sequence[EngineEvent]) -> int:
    """Returns the size of what `split_report` splits in some events."""
    total = 0
    for event in events:
        if isinstance(event, Tokens):
            total += len(event.routed_experts) + sum(map(len, event.sampling_masks))
        elif isinstance(event, PromptLogprobs):
            total += len(event.logprobs) * _LOGPROB_BYTES
    return total


def _serialized(event: dict[str, Any]) -> bytes:
    return pb.GenerateResponse(**event).SerializeToString()


def _fields(event: EngineEvent, numbers: Numbers) -> tuple[str, dict[str, Any]]:
    """Returns the event's name in `GenerateResponse.event`, and its fields."""
    match event:
        case Tokens():
            return "tokens", {
                "token_ids": event.token_ids,
                "logprobs": event.logprobs,
                "weight_version": event.weight_version,
                "routed_experts": event.routed_experts,
                "sampling_masks": event.sampling_masks,
            }
        case PromptLogprobs():
            return "prompt_logprobs", {
                "logprobs": event.logprobs,
                "weight_version": event.weight_version,
            }
        case Started():
            return "started", {
                "cached_prompt_tokens": event.cached_prompt_tokens,
                "queue_time": _duration(numbers["queue_s"]),
            }
        case Finished():
            return "finished", {
                "reason": _FINISH_REASONS[event.reason],
                "num_tokens": numbers["num_tokens"],
                "engine_time": _duration(numbers["engine_s"]),
                "prefill_time": _duration(numbers["prefill_s"]),
                "paused_time": _duration(numbers["paused_s"]),
            }


def _duration(seconds: float) -> dict[str, int]:
    """Returns a `google.protobuf.Duration`, rounded to microseconds."""
    whole, microseconds = divmod(round(seconds * 1_000_000), 1_000_000)
    return {"seconds": whole, "nanos": microseconds * 1000}
