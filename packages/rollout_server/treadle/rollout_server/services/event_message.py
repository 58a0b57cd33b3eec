"""Encodes events of an engine as messages of Generate.

Each function returns one serialized `GenerateResponse`, which goes to gRPC as bytes. Fields are
passed as dictionaries, which protobuf reads twice as fast as messages made for them: the three
messages of a short completion are a tenth of its cost to the server.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout_server.engine import EngineEvent, Finished, FinishReason, Started, Tokens

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.INTERRUPTED: pb.FINISH_REASON_INTERRUPTED,
}


class Numbers(TypedDict):
    """Numbers that the server adds to events: seconds in its queue and engine, tokens so far."""

    queue_s: float
    engine_s: float
    num_tokens: int


def encode_event(event: EngineEvent, *, queue_s: float, engine_s: float, num_tokens: int) -> bytes:
    """Encodes one event, with the numbers for which its message has fields."""
    name, fields = _fields(event, queue_s, engine_s, num_tokens)
    return _serialized({name: fields})


def encode_batch(
    events: Sequence[EngineEvent], *, queue_s: float, engine_s: float, num_tokens: int
) -> bytes:
    """Encodes events that are ready together, in order; only for requests with `batched`."""
    batch: dict[str, Any] = {}
    for event in events:
        name, fields = _fields(event, queue_s, engine_s, num_tokens)
        if name == "tokens":
            batch.setdefault(name, []).append(fields)
        else:
            batch[name] = fields
    return _serialized({"batch": batch})


def _serialized(event: dict[str, Any]) -> bytes:
    return pb.GenerateResponse(**event).SerializeToString()


def _fields(
    event: EngineEvent, queue_s: float, engine_s: float, num_tokens: int
) -> tuple[str, dict[str, Any]]:
    """Returns the event's name in `GenerateResponse.event`, and its fields."""
    match event:
        case Tokens():
            return "tokens", {
                "token_ids": event.token_ids,
                "logprobs": event.logprobs,
                "weight_version": event.weight_version,
            }
        case Started():
            return "started", {
                "cached_prompt_tokens": event.cached_prompt_tokens,
                "queue_time": _duration(queue_s),
            }
        case Finished():
            return "finished", {
                "reason": _FINISH_REASONS[event.reason],
                "num_tokens": num_tokens,
                "engine_time": _duration(engine_s),
            }


def _duration(seconds: float) -> dict[str, int]:
    """Returns a `google.protobuf.Duration`, rounded to microseconds."""
    whole, microseconds = divmod(round(seconds * 1_000_000), 1_000_000)
    return {"seconds": whole, "nanos": microseconds * 1000}
