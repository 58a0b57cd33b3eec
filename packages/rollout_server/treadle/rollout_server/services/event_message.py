"""A message of Generate, encoded from the engine's events.

Invariant: what comes out is one serialized `GenerateResponse`; it is handed to gRPC as bytes.
Fields are given as dictionaries, which protobuf reads twice as fast as messages made for them:
three messages a completion are a tenth of what a short one costs the server.
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
    """What the server adds to events: seconds in its queue and in the engine, tokens so far."""

    queue_s: float
    engine_s: float
    num_tokens: int


def encode_event(event: EngineEvent, *, queue_s: float, engine_s: float, num_tokens: int) -> bytes:
    """One event; the numbers go where the message has room for them."""
    name, fields = _fields(event, queue_s, engine_s, num_tokens)
    return _serialized({name: fields})


def encode_batch(
    events: Sequence[EngineEvent], *, queue_s: float, engine_s: float, num_tokens: int
) -> bytes:
    """Events that are ready together, in their order; only for requests that are `batched`."""
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
    """The event's name in `GenerateResponse.event`, and its fields."""
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
    """A `google.protobuf.Duration`, to the microsecond."""
    whole, microseconds = divmod(round(seconds * 1_000_000), 1_000_000)
    return {"seconds": whole, "nanos": microseconds * 1000}
