"""GenerationService: one completion per call.

Invariant: a stream is one `started`, chunks of tokens, one `finished`, or it fails; and
however the call ends, its sequence has left the engine when the handler returns.
"""

from collections.abc import AsyncGenerator

import grpc.aio

from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout.v1 import generation_service_pb2_grpc as pb_grpc
from treadle.rollout_server.coalesce import Coalescer
from treadle.rollout_server.engine import Started, Tokens
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services.codec import decode_generate, encode_event


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Serves `Replica.generate`."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Streams one completion."""
        replica = self._replica
        wanted = decode_generate(request, replica.engine.info)
        settings = replica.config.coalesce
        now = replica.clock.time
        began = started = now()
        num_tokens = 0
        async with Coalescer(
            replica.generate(wanted, min_weight_version=request.min_weight_version),
            max_tokens=settings.max_tokens,
            max_wait_s=settings.max_wait_s,
            clock=replica.clock,
        ) as events:
            async for event in events:
                if isinstance(event, Started):
                    started = now()
                elif isinstance(event, Tokens):
                    num_tokens += len(event.token_ids)
                    assert num_tokens <= wanted.sampling.max_tokens, "the engine went on too long"
                yield encode_event(
                    event,
                    queue_s=started - began,
                    engine_s=now() - started,
                    num_tokens=num_tokens,
                )
