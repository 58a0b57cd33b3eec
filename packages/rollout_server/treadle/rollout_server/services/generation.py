"""GenerationService: one completion per call.

Invariant: a stream is one `started`, chunks of tokens, one `finished`, or it fails. However the
call ends, its sequence has left the engine when the handler returns.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout_server.engine import EngineEvent, Finished, Started, Tokens
from treadle.rollout_server.errors import RolloutServerError
from treadle.rollout_server.observability.server_stats import ServerStats
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services.coalesce import Coalescer
from treadle.rollout_server.services.codec import decode_generate
from treadle.rollout_server.services.errors import reason_name
from treadle.rollout_server.services.event_message import (
    MAX_REPORT_BYTES,
    Numbers,
    encode_batch,
    encode_event,
    report_bytes,
    split_report,
)
from treadle.rollout_server.services.methods import Methods

_log = logging.getLogger(__name__)
_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationServicer:
    """Serves `Replica.generate`.

    Args:
        replica: What it serves.
        stats: Counts completions by outcome.
    """

    def __init__(self, replica: Replica, stats: ServerStats) -> None:
        self._replica = replica
        self._stats = stats

    async def generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, bytes],
    ) -> bytes:
        """Writes one completion as serialized `GenerateResponse`s; returns the last one."""
        replica = self._replica
        with _Call(self._stats, replica.clock.time) as call:
            wanted = decode_generate(request, replica.engine.info)
            row_bytes = replica.engine.info.model.routed_row_bytes

            def messages(events: Sequence[EngineEvent]) -> list[bytes]:
                call.note(events, len(wanted.prompt))
                assert call.num_tokens <= wanted.sampling.max_tokens, "the engine went on"
                numbers = call.numbers()
                if report_bytes(events) > MAX_REPORT_BYTES:
                    parts = (part for event in events for part in split_report(event, row_bytes))
                    return [encode_event(part, **numbers) for part in parts]
                if request.batched and len(events) > 1:
                    return [encode_batch(events, **numbers)]
                return [encode_event(event, **numbers) for event in events]

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
                        coalescer.add(event)
                *before, last = messages(await coalescer.rest())
            for message in before:
                await context.write(message)
            return last


class _Call:
    """Counts one completion. A context manager: leaving it ends the completion."""

    __slots__ = ("_began", "_now", "_outcome", "_started", "_stats", "num_tokens")

    def __init__(self, stats: ServerStats, now: Callable[[], float]) -> None:
        self._stats = stats
        self._now = now
        self._began = now()
        self._started: float | None = None
        self._outcome = "cancelled"
        self.num_tokens = 0

    def note(self, events: Sequence[EngineEvent], prompt_tokens: int) -> None:
        """Counts events that are about to be sent."""
        stats = self._stats
        for event in events:
            if isinstance(event, Tokens):
                self.num_tokens += len(event.token_ids)
                stats.sampled_tokens += len(event.token_ids)
            elif isinstance(event, Started):
                self._started = self._now()
                stats.queue_s.add(self._started - self._began)
                stats.prompt_tokens += prompt_tokens
                stats.cached_prompt_tokens += event.cached_prompt_tokens
            elif isinstance(event, Finished):
                self._outcome = event.reason.value

    def numbers(self) -> Numbers:
        """Returns the numbers that messages carry."""
        now = self._now()
        started = now if self._started is None else self._started
        return {
            "queue_s": started - self._began,
            "engine_s": now - started,
            "num_tokens": self.num_tokens,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RolloutServerError):
            self._outcome = reason_name(error).lower()
        elif isinstance(error, Exception) and not isinstance(error, grpc.aio.BaseError):
            self._outcome = "bug"  # Else gRPC could not write: the caller has gone.
        self._stats.completions[self._outcome] += 1
        if self._started is not None:
            self._stats.engine_s.add(self._now() - self._started)
        if _log.isEnabledFor(logging.DEBUG):
            numbers = self.numbers()
            _log.debug(
                "%s after %d tokens, %.3f s in the queue, %.3f s in the engine",
                self._outcome,
                self.num_tokens,
                numbers["queue_s"],
                numbers["engine_s"],
            )


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
