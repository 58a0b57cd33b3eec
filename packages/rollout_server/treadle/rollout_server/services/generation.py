"""GenerationService: one completion per call.

Invariant: a stream is one `started`, chunks of tokens, one `finished`, or it fails. However the
call ends, its sequence has left the engine when the handler returns.
"""

from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import grpc

from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout_server.engine import EngineEvent
from treadle.rollout_server.observability.server_stats import ServerStats
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services.call_record import CallRecord
from treadle.rollout_server.services.coalesce import Coalescer
from treadle.rollout_server.services.codec import decode_generate
from treadle.rollout_server.services.event_message import (
    MAX_REPORT_BYTES,
    encode_batch,
    encode_event,
    report_bytes,
    split_report,
)
from treadle.rollout_server.services.methods import Methods
from treadle.tracing import TraceSink, serving_span

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class Caller(Protocol):
    """The call of a completion: gRPC's context, or that of one of many completions."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Returns the call's metadata."""
        ...

    async def write(self, message: bytes, /) -> None:
        """Sends a serialized `GenerateResponse`; waits while the caller does not read."""
        ...


class GenerationServicer:
    """Serves `Replica.generate`.

    Args:
        sink: Where the spans of calls go whose callers record their traces.
    """

    def __init__(self, replica: Replica, stats: ServerStats, sink: TraceSink) -> None:
        self._replica = replica
        self._stats = stats
        self._sink = sink

    async def generate(self, request: pb.GenerateRequest, context: Caller) -> bytes:
        """Writes one completion as serialized `GenerateResponse`s; returns the last one."""
        replica = self._replica
        with (
            serving_span(
                self._sink,
                context.invocation_metadata,
                "server.generate",
                request_id=request.request_id,
                prompt_tokens=len(request.prompt_token_ids),
            ) as trace,
            CallRecord(self._stats, replica.pauses, replica.clock.time, trace) as call,
        ):
            wanted = decode_generate(request, replica.engine.info)
            row_bytes = replica.engine.info.model.routed_row_bytes

            def messages(events: Sequence[EngineEvent]) -> list[bytes]:
                call.note(events, len(wanted.prompt))
                assert call.num_tokens <= wanted.sampling.max_tokens, "the engine went on"
                numbers = call.numbers()
                if report_bytes(events) > MAX_REPORT_BYTES:
                    parts = (part for event in events for part in split_report(event, row_bytes))
                    return [encode_event(part, numbers) for part in parts]
                if request.batched and len(events) > 1:
                    return [encode_batch(events, numbers)]
                return [encode_event(event, numbers) for event in events]

            async def send(events: Sequence[EngineEvent]) -> None:
                for message in messages(events):
                    await context.write(message)

            settings = replica.config.coalesce
            async with Coalescer(
                send,
                max_tokens=settings.max_tokens,
                max_wait_s=settings.max_wait_s,
                clock=replica.clock,
            ) as coalescer:
                async with aclosing(
                    replica.generate(wanted, min_weight_version=request.min_weight_version)
                ) as events:
                    async for event in events:
                        call.arrived(event)
                        coalescer.add(event)
                *before, last = messages(await coalescer.rest())
            for message in before:
                await context.write(message)
            return last


def add_to_server(servicer: GenerationServicer, server: Methods) -> None:
    """Serves Generate, whose messages leave as the bytes that the servicer makes.

    Registered as unary-unary: on the wire a stream with one message looks like a unary response,
    and gRPC sends the message that a unary handler returns together with the status, which it does
    not do at the end of a stream. That saves a pass through its polling thread, a sixth of the cost
    of a short call.

    That a unary handler may write messages first is how gRPC works (1.76 to 1.85), not what it
    promises: every handler gets the same context except for the serializers, which we do not use.
    If `generation_test` fails with another version, make this a stream handler again, which writes
    its last message like the others.
    """
    generate: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
        servicer.generate, request_deserializer=pb.GenerateRequest.FromString
    )
    server.add_registered_method_handlers(_SERVICE, {"Generate": generate})
