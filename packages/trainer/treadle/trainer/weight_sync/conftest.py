"""A policy that only has weights, and a server that only takes them."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import torch
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from safetensors.torch import load_file

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout.v1 import weight_sync_service_pb2_grpc as pb_grpc
from treadle.trainer.policy import NamedTensor, TensorSpec
from treadle.trainer.policy_commands import Command, Push, Specs, WriteFiles
from treadle.trainer.weight_sync.client import WeightSyncClient
from treadle.trainer.weight_sync.file import write_files
from treadle.trainer.weight_sync.inline import push

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic in its stub only


class Weights:
    """A policy of one rank; stands for the ranks and for the group of them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"a": (3, 5), "b": (700,), "empty": (0,), "scalar": ()}
        self.tensors = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        self.exports = 0

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), element_type="float32", sender=0)
            for name, tensor in self.tensors.items()
        )

    def export_weights(self) -> Iterator[NamedTensor]:
        self.exports += 1
        for name, tensor in self.tensors.items():
            yield NamedTensor(name=name, tensor=tensor)

    async def call(self, command: Command) -> Sequence[Any]:
        """As `PolicyGroup.call`."""
        match command:
            case Specs():
                return [self.weight_specs()]
            case Push():
                return [await asyncio.to_thread(push, self, command, rank=0)]
            case WriteFiles():
                return [await asyncio.to_thread(write_files, self, command, rank=0)]
        raise NotImplementedError(command)


class Taker(pb_grpc.WeightSyncServiceServicer):
    """Takes one update at a time; keeps what a real server would sample from.

    `refuse` maps a method to the reason that its next call is refused with; `break_after` ends
    the next push after so many bytes; a push reads nothing before `push_waits_for`, and GetUpdate
    is not answered before `get_waits_for`.
    """

    def __init__(self) -> None:
        self.version = 0
        self.weights: dict[str, bytes] = {}
        self.refuse: dict[str, str] = {}
        self.break_after: int | None = None
        self.calls: list[str] = []
        self.largest_chunk = 0
        self.max_chunk_bytes = 1 << 20
        self.renewed = asyncio.Event()
        self.push_waits_for: asyncio.Event | None = None
        self.get_waits_for: asyncio.Event | None = None
        self._update: pb.BeginUpdateRequest | None = None
        self._staged: dict[int, bytearray] = {}

    async def BeginUpdate(
        self, request: pb.BeginUpdateRequest, context: Context
    ) -> pb.BeginUpdateResponse:
        await self._enter("BeginUpdate", context)
        if self._update is None or self._update.update_id != request.update_id:
            self._update = request
            self._staged = {index: bytearray() for index in range(len(request.tensors))}
        if request.HasField("file"):
            await asyncio.to_thread(self._read, request)
        return pb.BeginUpdateResponse(
            received_bytes=self._received(), max_chunk_bytes=self.max_chunk_bytes
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
        assert self._update is not None
        specs = self._update.tensors
        self.weights = {spec.name: bytes(self._staged[i]) for i, spec in enumerate(specs)}
        self.version = self._update.weight_version
        return pb.CommitUpdateResponse(weight_version=self.version)

    async def AbortUpdate(
        self, request: pb.AbortUpdateRequest, context: Context
    ) -> pb.AbortUpdateResponse:
        await self._enter("AbortUpdate", context)
        self._update = None
        return pb.AbortUpdateResponse()

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
            packed = any_pb2.Any()
            packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="treadle.rollout.v1"))
            status = status_pb2.Status(
                code=grpc.StatusCode.INTERNAL.value[0], message="no", details=[packed]
            )
            await context.abort_with_status(rpc_status.to_status(status))


@pytest.fixture
def weights() -> Weights:
    """Four tensors, of which one is empty and one a scalar."""
    return Weights()


Serve = Callable[[str], Awaitable[tuple[Taker, WeightSyncClient]]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a taker under a name."""
    async with AsyncExitStack() as stack:

        async def start(name: str) -> tuple[Taker, WeightSyncClient]:
            taker, server = Taker(), grpc.aio.server()
            pb_grpc.add_WeightSyncServiceServicer_to_server(taker, server)  # type: ignore[no-untyped-call]
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            client = WeightSyncClient(
                name, f"127.0.0.1:{port}", control_deadline_s=10, commit_deadline_s=10
            )
            stack.push_async_callback(client.aclose)
            return taker, client

        yield start
