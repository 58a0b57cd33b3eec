"""WeightSyncService: one update at a time, from Begin to Commit.

Invariant: nothing here applies weights or holds bytes; `updates/` does. A stream that breaks leaves
in the update what had arrived.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Final

import grpc
import grpc.aio

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout.v1 import weight_sync_service_pb2_grpc as pb_grpc
from treadle.rollout_server.engine import CollectiveGroup
from treadle.rollout_server.errors import CapabilityMissing, InvalidField
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services.begin import decode_begin
from treadle.rollout_server.services.codec import decode_in_flight, decode_update_id
from treadle.rollout_server.services.methods import Methods
from treadle.rollout_server.services.push_buckets import push_buckets
from treadle.rollout_server.services.push_message import PushedChunk, decode_push
from treadle.rollout_server.updates import delta

_MANY_TENSORS: Final = 4096
"""Above this number the announcement is read beside the event loop; those of a model of 70B are
fewer, and take milliseconds."""
_SERVICE = pb.DESCRIPTOR.services_by_name["WeightSyncService"].full_name


class WeightSyncServicer(pb_grpc.WeightSyncServiceServicer):
    """Serves the replica's updates."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def BeginUpdate(
        self,
        request: pb.BeginUpdateRequest,
        context: grpc.aio.ServicerContext[pb.BeginUpdateRequest, pb.BeginUpdateResponse],
    ) -> pb.BeginUpdateResponse:
        """Opens an update; with transport `file`, reads its files."""
        replica = self._replica
        engine, config = replica.engine, replica.config
        plaintext = (
            config.insecure_allow_plaintext_beyond_loopback or config.weights.allow_plaintext_group
        )
        decode = partial(
            decode_begin,
            request,
            max_lease_s=config.weights.max_lease_s,
            num_workers=engine.info.num_workers,
            loopback_only=not plaintext,
        )
        many = len(request.tensors) > _MANY_TENSORS
        begin = await asyncio.to_thread(decode) if many else decode()
        collective = isinstance(begin.source, CollectiveGroup)
        if collective and not engine.info.capabilities.collective:
            raise CapabilityMissing(engine.info.name, "collective_transport")
        if (begin.delta is not None or begin.keep_base) and not delta.available():
            raise CapabilityMissing(engine.info.name, "delta_encoding")
        update = await replica.updates.begin(begin)
        return pb.BeginUpdateResponse(
            received_bytes=update.received,
            max_chunk_bytes=replica.config.weights.max_chunk_bytes,
            split_tensors=update.incoming.split_tensors,
        )

    async def PushWeights(
        self,
        request_iterator: AsyncIterator[PushedChunk | pb.PushHeader | None],
        context: grpc.aio.ServicerContext[pb.PushWeightsRequest, pb.PushWeightsResponse],
    ) -> pb.PushWeightsResponse:
        """Takes the chunks of one stream, whose messages `decode_push` has decoded."""
        header = await anext(request_iterator, None)
        if not isinstance(header, pb.PushHeader):
            raise InvalidField("payload", "no header", "a header as the first message")
        update = self._replica.current_update.find(decode_update_id(header.update_id))
        update.incoming.check_pushed()
        received_bytes = 0
        async for chunk in request_iterator:
            if not isinstance(chunk, PushedChunk):
                raise InvalidField("payload", "no chunk", "chunks after the header")
            with update.working(self._replica.clock):
                await update.incoming.room()
            # Leaving `working` has restarted the lease.
            update.incoming.accept(chunk.tensor_index, chunk.offset, chunk.crc32, chunk.data)
            received_bytes += len(chunk.data)
        return pb.PushWeightsResponse(received_bytes=received_bytes)

    async def PushBuckets(
        self,
        request_iterator: AsyncIterator[pb.PushBucketsRequest],
        context: grpc.aio.ServicerContext[pb.PushBucketsRequest, pb.PushBucketsResponse],
    ) -> AsyncGenerator[pb.PushBucketsResponse, None]:
        """Takes the buckets of one sender on this host."""
        async with aclosing(push_buckets(self._replica, request_iterator)) as responses:
            async for response in responses:
                yield response

    async def GetUpdate(
        self,
        request: pb.GetUpdateRequest,
        context: grpc.aio.ServicerContext[pb.GetUpdateRequest, pb.GetUpdateResponse],
    ) -> pb.GetUpdateResponse:
        """Returns where to resume and renews the lease."""
        update = self._replica.current_update.find(decode_update_id(request.update_id))
        return pb.GetUpdateResponse(received_bytes=update.incoming.received)

    async def CommitUpdate(
        self,
        request: pb.CommitUpdateRequest,
        context: grpc.aio.ServicerContext[pb.CommitUpdateRequest, pb.CommitUpdateResponse],
    ) -> pb.CommitUpdateResponse:
        """Switches to the new weights."""
        update_id = decode_update_id(request.update_id)
        updates = self._replica.updates
        version = self._replica.current_update.committed_version(update_id)
        if version is not None:  # The first answer got lost.
            return pb.CommitUpdateResponse(weight_version=version)
        update = self._replica.current_update.find(update_id)
        policy = None if update.begin.is_in_place else decode_in_flight(request.in_flight)
        version = await updates.commit(update_id, policy)
        return pb.CommitUpdateResponse(weight_version=version)

    async def AbortUpdate(
        self,
        request: pb.AbortUpdateRequest,
        context: grpc.aio.ServicerContext[pb.AbortUpdateRequest, pb.AbortUpdateResponse],
    ) -> pb.AbortUpdateResponse:
        """Drops an update."""
        await self._replica.updates.abort(decode_update_id(request.update_id))
        return pb.AbortUpdateResponse()


def add_to_server(servicer: WeightSyncServicer, server: Methods) -> None:
    """Serves every method as generated, except PushWeights, which copies no chunk."""
    pb_grpc.add_WeightSyncServiceServicer_to_server(servicer, server)
    push = grpc.stream_unary_rpc_method_handler(
        servicer.PushWeights,
        request_deserializer=decode_push,
        response_serializer=pb.PushWeightsResponse.SerializeToString,
    )
    server.add_registered_method_handlers(_SERVICE, {"PushWeights": push})
