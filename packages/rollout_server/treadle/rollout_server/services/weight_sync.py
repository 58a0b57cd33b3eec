"""WeightSyncService: one update at a time, from Begin to Commit.

Invariant: nothing here applies weights or holds bytes; the session does, and the replica
switches. A stream that breaks leaves in the session what had arrived.
"""

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout.v1 import weight_sync_service_pb2_grpc as pb_grpc
from treadle.rollout_server.errors import CapabilityMissing, InvalidField
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services.codec import (
    decode_in_flight,
    decode_lease,
    decode_tensors,
    decode_update_id,
)
from treadle.rollout_server.services.push_message import PushedChunk, decode_push

_SERVICE = pb.DESCRIPTOR.services_by_name["WeightSyncService"].full_name


class WeightSyncServicer(pb_grpc.WeightSyncServiceServicer):
    """Serves the replica's update slot."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def BeginUpdate(
        self,
        request: pb.BeginUpdateRequest,
        context: grpc.aio.ServicerContext[pb.BeginUpdateRequest, pb.BeginUpdateResponse],
    ) -> pb.BeginUpdateResponse:
        """Opens an update; reads its files when the transport is file."""
        replica = self._replica
        update_id = decode_update_id(request.update_id)
        lease_s = decode_lease(request, max_s=replica.config.weights.max_lease_s)
        tensors = decode_tensors(request.tensors)
        transport = request.WhichOneof("transport")
        if transport is None:
            raise InvalidField("transport", "unset", "inline or file")
        if transport == "collective":
            raise CapabilityMissing(replica.engine.info.name, "collective_transport")
        if transport == "file" and len(request.file.crc32) != len(tensors):
            shown = f"{len(request.file.crc32)} checksums"
            raise InvalidField("file.crc32", shown, f"one for each of {len(tensors)} tensors")
        session = replica.begin_update(update_id, request.weight_version, tensors, lease_s)
        if transport == "file":
            await replica.stage_files(session, request.file.directory, list(request.file.crc32))
        return pb.BeginUpdateResponse(
            received_bytes=session.assembler.received,
            max_chunk_bytes=replica.config.weights.max_chunk_bytes,
        )

    async def PushWeights(
        self,
        request_iterator: AsyncIterator[PushedChunk | pb.PushHeader | None],
        context: grpc.aio.ServicerContext[pb.PushWeightsRequest, pb.PushWeightsResponse],
    ) -> pb.PushWeightsResponse:
        """Stages the chunks of one stream, whose messages `decode_push` has read."""
        header = await anext(request_iterator, None)
        if not isinstance(header, pb.PushHeader):
            raise InvalidField("payload", "no header", "a header as the first message")
        session = self._replica.slot.find(decode_update_id(header.update_id))
        now = self._replica.clock.time
        received_bytes = 0
        async for chunk in request_iterator:
            if not isinstance(chunk, PushedChunk):
                raise InvalidField("payload", "no chunk", "chunks after the header")
            session.accept(chunk.tensor_index, chunk.offset, chunk.crc32, chunk.data, now=now())
            received_bytes += len(chunk.data)
        return pb.PushWeightsResponse(received_bytes=received_bytes)

    async def GetUpdate(
        self,
        request: pb.GetUpdateRequest,
        context: grpc.aio.ServicerContext[pb.GetUpdateRequest, pb.GetUpdateResponse],
    ) -> pb.GetUpdateResponse:
        """Tells where to resume and renews the lease."""
        session = self._replica.slot.find(decode_update_id(request.update_id))
        return pb.GetUpdateResponse(received_bytes=session.assembler.received)

    async def CommitUpdate(
        self,
        request: pb.CommitUpdateRequest,
        context: grpc.aio.ServicerContext[pb.CommitUpdateRequest, pb.CommitUpdateResponse],
    ) -> pb.CommitUpdateResponse:
        """Switches versions."""
        update_id = decode_update_id(request.update_id)
        version = await self._replica.commit(update_id, decode_in_flight(request.in_flight))
        return pb.CommitUpdateResponse(weight_version=version)

    async def AbortUpdate(
        self,
        request: pb.AbortUpdateRequest,
        context: grpc.aio.ServicerContext[pb.AbortUpdateRequest, pb.AbortUpdateResponse],
    ) -> pb.AbortUpdateResponse:
        """Drops an update."""
        self._replica.abort_update(decode_update_id(request.update_id))
        return pb.AbortUpdateResponse()


def add_to_server(servicer: WeightSyncServicer, server: grpc.aio.Server) -> None:
    """Serves every method as generated, but PushWeights without copying its chunks."""
    pb_grpc.add_WeightSyncServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    push = grpc.stream_unary_rpc_method_handler(
        servicer.PushWeights,
        request_deserializer=decode_push,
        response_serializer=pb.PushWeightsResponse.SerializeToString,
    )
    server.add_registered_method_handlers(_SERVICE, {"PushWeights": push})
