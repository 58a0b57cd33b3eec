"""A policy that has only weights, and a server that only receives them."""

import asyncio
import os
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
import torch
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from safetensors.torch import load_file

from treadle.policy.client.types import NamedTensor, TensorSpec
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.delta import DeltaSender
from treadle.policy.weight_sync.payload import specs_response
from treadle.policy.weight_sync.transports.file import write_files
from treadle.policy.weight_sync.transports.inline import push
from treadle.policy.weight_sync.transports.shared_memory import SharedMemorySender
from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout.v1 import weight_sync_service_pb2_grpc as pb_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic in its stub only


class Weights:
    """A policy of one rank; stands for the ranks and for their group."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"a": (3, 5), "b": (700,), "empty": (0,), "scalar": ()}
        self.tensors = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        self.exports = 0
        self.sender = SharedMemorySender()
        self.delta = DeltaSender()

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), element_type="float32", sender=0)
            for name, tensor in self.tensors.items()
        )

    def export_weights(self) -> Iterator[NamedTensor]:
        self.exports += 1
        for name, tensor in self.tensors.items():
            yield NamedTensor(name=name, tensor=tensor)

    async def call(self, request: Message) -> Sequence[Any]:
        """As `PolicyGroup.call`."""
        match request:
            case weights_pb.GetWeightSpecsRequest():
                return [specs_response(self.weight_specs())]
            case weights_pb.ComputeDeltaRequest():
                return [await asyncio.to_thread(self.delta.compute, self, request, rank=0)]
            case weights_pb.PushRequest(delta=True):
                return [await asyncio.to_thread(self.delta.push, self, request, rank=0)]
            case weights_pb.PushRequest():
                return [await asyncio.to_thread(push, self, request, rank=0)]
            case weights_pb.WriteFilesRequest() if request.HasField("base_version"):
                return [await asyncio.to_thread(self.delta.write, self, request, rank=0)]
            case weights_pb.WriteFilesRequest():
                return [await asyncio.to_thread(write_files, self, request, rank=0)]
            case weights_pb.PushSharedMemoryRequest():
                return [await asyncio.to_thread(self.sender.push, self, request, rank=0)]
        raise NotImplementedError(request)


class FakeServer(pb_grpc.WeightSyncServiceServicer):
    """Takes one update at a time; keeps what a real server would sample from.

    Attributes:
        refuse: Method -> reason with which its next call is refused.
        lose: Methods whose next call is executed but not answered.
        break_after: Number of bytes after which the next push breaks, at the end of its bucket.
        push_waits_for: A push reads nothing before this event; `begin_waits_for`,
            `get_waits_for`, `commit_waits_for` and `abort_waits_for` hold back the answers of
            Begin, GetUpdate, Commit and Abort.
    """

    def __init__(self) -> None:
        self.version = 0
        self.weights: dict[str, bytes] = {}
        self.refuse: dict[str, str] = {}
        self.lose: set[str] = set()
        self.break_after: int | None = None
        self.base: int | None = None
        self.deltas: list[bool] = []
        self.calls: list[str] = []
        self.in_flight: pb.InFlightPolicy | None = None
        self.in_place: pb.InFlightPolicy | None = None
        self.slots: list[int] = []
        self.largest_chunk = 0
        self.max_chunk_bytes = 1 << 20
        self.split_tensors = False
        self.part_offsets: list[int] = []
        self.renewed = asyncio.Event()
        self.push_waits_for: asyncio.Event | None = None
        self.begin_waits_for: asyncio.Event | None = None
        self.get_waits_for: asyncio.Event | None = None
        self.commit_waits_for: asyncio.Event | None = None
        self.abort_waits_for: asyncio.Event | None = None
        self.aborting = asyncio.Event()
        self._update: pb.BeginUpdateRequest | None = None
        self._staged: dict[int, bytearray] = {}

    async def BeginUpdate(
        self, request: pb.BeginUpdateRequest, context: Context
    ) -> pb.BeginUpdateResponse:
        await self._enter("BeginUpdate", context)
        if self.begin_waits_for is not None:
            await self.begin_waits_for.wait()
        if request.HasField("delta") and request.delta.base_weight_version != self.base:
            await self._refuse("DELTA_BASE_MISMATCH", context)
        if self._update is None or self._update.update_id != request.update_id:
            self._update = request
            self._staged = {index: bytearray() for index in range(len(request.tensors))}
        self.in_place = request.in_place.in_flight if request.HasField("in_place") else None
        if request.HasField("file"):
            await asyncio.to_thread(self._read, request)
        await self._leave("BeginUpdate", context)
        return pb.BeginUpdateResponse(
            received_bytes=self._received(),
            max_chunk_bytes=self.max_chunk_bytes,
            split_tensors=self.split_tensors,
        )

    async def PushWeights(
        self, requests: AsyncIterator[pb.PushWeightsRequest], context: Context
    ) -> pb.PushWeightsResponse:
        await self._enter("PushWeights", context)
        if self.push_waits_for is not None:
            await self.push_waits_for.wait()
        pushed = 0
        async for request in requests:
            if request.HasField("header"):
                continue
            chunk = request.chunk
            staged = self._staged[chunk.tensor_index]
            assert chunk.offset == len(staged)
            assert chunk.crc32 == zlib.crc32(chunk.data)
            self.largest_chunk = max(self.largest_chunk, len(chunk.data))
            staged += chunk.data
            pushed += len(chunk.data)
            if self.break_after is not None and pushed >= self.break_after:
                self.break_after = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        return pb.PushWeightsResponse(received_bytes=sum(self._received()))

    async def PushBuckets(
        self, requests: AsyncIterator[pb.PushBucketsRequest], context: Context
    ) -> AsyncIterator[pb.PushBucketsResponse]:
        await self._enter("PushBuckets", context)
        header = (await anext(requests)).header
        pushed = 0
        segment = os.open(f"/proc/{header.pid}/fd/{header.fd}", os.O_RDONLY)
        try:
            assert os.pread(segment, 4096, 0).rstrip(b"\0").decode() == header.update_id
            async for request in requests:
                if self.push_waits_for is not None:
                    await self.push_waits_for.wait()
                for part in request.bucket.parts:
                    assert part.start + part.length <= header.num_bytes
                    data = os.pread(segment, part.length, part.start)
                    self._staged[part.tensor_index] += data
                    self.part_offsets.append(part.offset)
                    pushed += part.length
                last = not request.bucket.parts
                self.slots.append(request.bucket.slot)
                if self.break_after is not None and pushed >= self.break_after:
                    self.break_after = None
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
                yield pb.PushBucketsResponse(slot=request.bucket.slot)
                if last:
                    return
        finally:
            os.close(segment)

    async def GetUpdate(
        self, request: pb.GetUpdateRequest, context: Context
    ) -> pb.GetUpdateResponse:
        await self._enter("GetUpdate", context)
        self.renewed.set()
        if self.get_waits_for is not None:
            await self.get_waits_for.wait()
        return pb.GetUpdateResponse(received_bytes=self._received())

    async def CommitUpdate(
        self, request: pb.CommitUpdateRequest, context: Context
    ) -> pb.CommitUpdateResponse:
        await self._enter("CommitUpdate", context)
        if self.commit_waits_for is not None:
            await self.commit_waits_for.wait()
        assert self._update is not None
        self.in_flight = request.in_flight
        specs = self._update.tensors
        for i, spec in enumerate(specs):
            data = bytes(self._staged[i])
            if self._update.HasField("delta"):
                data = self._changed(self.weights[spec.name], data)
                assert zlib.crc32(data) == self._update.delta.crc32[i]
            self.weights[spec.name] = data
        self.deltas.append(self._update.HasField("delta"))
        self.base = self._update.weight_version if self._update.keep_base else None
        self.version = self._update.weight_version
        await self._leave("CommitUpdate", context)
        return pb.CommitUpdateResponse(weight_version=self.version)

    async def AbortUpdate(
        self, request: pb.AbortUpdateRequest, context: Context
    ) -> pb.AbortUpdateResponse:
        await self._enter("AbortUpdate", context)
        self.aborting.set()
        if self.abort_waits_for is not None:
            await self.abort_waits_for.wait()
        self._update = None
        return pb.AbortUpdateResponse()

    @staticmethod
    def _changed(old: bytes, encoded: bytes) -> bytes:
        """Returns `old` with the changes of a `BeginUpdateRequest.delta`, of float32."""
        new = bytearray(old)
        count = int.from_bytes(encoded[:8], "little")
        assert len(encoded) == (8 + count * 8 if count else 0)
        for n in range(count):
            place = int.from_bytes(encoded[8 + 4 * n :][:4], "little")
            new[4 * place : 4 * place + 4] = encoded[8 + 4 * count + 4 * n :][:4]
        return bytes(new)

    def _read(self, request: pb.BeginUpdateRequest) -> None:
        names = [spec.name for spec in request.tensors]
        for path in Path(request.file.directory).glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                index = names.index(name)
                self._staged[index] = bytearray(tensor.numpy().tobytes())
                assert zlib.crc32(self._staged[index]) == request.file.crc32[index]

    def _received(self) -> list[int]:
        return [len(self._staged[index]) for index in sorted(self._staged)]

    async def _enter(self, method: str, context: Context) -> None:
        self.calls.append(method)
        assert context.time_remaining() is not None
        reason = self.refuse.pop(method, None)
        if reason is not None:
            await self._refuse(reason, context)

    async def _leave(self, method: str, context: Context) -> None:
        if method in self.lose:
            self.lose.remove(method)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    @staticmethod
    async def _refuse(reason: str, context: Context) -> None:
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="treadle.rollout.v1"))
        status = status_pb2.Status(
            code=grpc.StatusCode.INTERNAL.value[0], message="no", details=[packed]
        )
        await context.abort_with_status(rpc_status.to_status(status))


Serve = Callable[[str], Awaitable[tuple[FakeServer, WeightSyncClient]]]
