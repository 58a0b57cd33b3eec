"""ServerService: the handshake, and pausing and resuming the engine.

Invariant: GetServerInfo answers in every state, so that a client can wait for a server
that loads; the other calls need an engine.
"""

import grpc.aio

from treadle.rollout.v1 import server_service_pb2 as pb
from treadle.rollout.v1 import server_service_pb2_grpc as pb_grpc
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services.codec import (
    decode_in_flight,
    decode_memory_kinds,
    encode_load,
    encode_model,
    encode_state,
    encode_time_use,
)
from treadle.rollout_server.updates import delta


class ServerServicer(pb_grpc.ServerServiceServicer):
    """Serves the replica's lifecycle."""

    def __init__(self, replica: Replica, server_version: str) -> None:
        self._replica = replica
        self._server_version = server_version

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        """Returns what this server is, what it can do, and what it does now."""
        replica = self._replica
        response = pb.GetServerInfoResponse(
            server_version=self._server_version,
            engine=replica.config.engine,
            state=encode_state(replica.state),
            limits=pb.AdmissionLimits(
                max_in_flight=replica.admission.max_in_flight,
                max_queued=replica.admission.max_queued,
                max_request_bytes=replica.config.max_request_bytes,
            ),
            time_use=encode_time_use(replica.time_use.seconds()),
        )
        engine = replica.loaded_engine
        if engine is not None:
            info = engine.info
            response.num_workers = info.num_workers
            response.load.CopyFrom(encode_load(engine.counters, replica.admission))
            response.engine = info.name
            response.engine_version = info.version
            response.model.CopyFrom(encode_model(info.model))
            response.weight_version = replica.weight_version
            response.capabilities.CopyFrom(
                pb.Capabilities(
                    sampled_logprobs=info.capabilities.sampled_logprobs,
                    priority=info.capabilities.priority,
                    in_flight_continue=info.capabilities.in_flight_continue,
                    inline_transport=True,
                    file_transport=replica.config.weights.directory is not None,
                    collective_transport=info.capabilities.collective,
                    release_memory=info.capabilities.release_memory,
                    images=info.capabilities.images,
                    in_place_update=True,
                    delta_encoding=delta.available(),
                    shared_memory_transport=True,
                    routed_experts=info.capabilities.routed_experts,
                    prompt_logprobs=info.capabilities.prompt_logprobs,
                    constrained_sampling=info.capabilities.constrained_sampling,
                    generate_many=True,
                    sampling_mask=info.capabilities.sampling_mask,
                )
            )
        return response

    async def Pause(
        self,
        request: pb.PauseRequest,
        context: grpc.aio.ServicerContext[pb.PauseRequest, pb.PauseResponse],
    ) -> pb.PauseResponse:
        """Pauses generation."""
        await self._replica.pause(decode_in_flight(request.in_flight))
        return pb.PauseResponse()

    async def Resume(
        self,
        request: pb.ResumeRequest,
        context: grpc.aio.ServicerContext[pb.ResumeRequest, pb.ResumeResponse],
    ) -> pb.ResumeResponse:
        """Resumes generation."""
        await self._replica.resume()
        return pb.ResumeResponse()

    async def ReleaseMemory(
        self,
        request: pb.ReleaseMemoryRequest,
        context: grpc.aio.ServicerContext[pb.ReleaseMemoryRequest, pb.ReleaseMemoryResponse],
    ) -> pb.ReleaseMemoryResponse:
        """Releases device memory."""
        await self._replica.release_memory(decode_memory_kinds(request.kinds))
        return pb.ReleaseMemoryResponse()

    async def RestoreMemory(
        self,
        request: pb.RestoreMemoryRequest,
        context: grpc.aio.ServicerContext[pb.RestoreMemoryRequest, pb.RestoreMemoryResponse],
    ) -> pb.RestoreMemoryResponse:
        """Takes device memory back."""
        await self._replica.restore_memory(decode_memory_kinds(request.kinds))
        return pb.RestoreMemoryResponse()
