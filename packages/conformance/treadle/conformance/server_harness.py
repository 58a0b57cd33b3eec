"""The harness through which a check talks to the server, message by message.

Invariant: after each check the server serves again, whatever the check did. Its updates are
aborted, torn weights are replaced, memory is restored, and a paused server is resumed.
"""

import os
import uuid
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from treadle.conformance.client.checkpoint import read_checkpoint, specs_of
from treadle.conformance.client.refusals import Refusal, read_refusal, refusal
from treadle.conformance.client.remote_messages import begin_request, push_messages
from treadle.conformance.client.shared_segment import (
    LAST,
    Part,
    SharedSegment,
    push_segment,
    whole_tensors,
)
from treadle.conformance.client.stubs import Stubs, stubs_for
from treadle.conformance.contracts.reader import stream
from treadle.conformance.settings import KitSettings
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import NamedTensor

CALL_S = 60.0
_KINDS = (srv.MEMORY_KIND_WEIGHTS, srv.MEMORY_KIND_KV_CACHE)


SHARED: dict[str, Any] = {"inline": None, "shared_memory": sync.SharedMemoryTransport()}
"""Fields of BeginUpdate for shared memory."""
Weights = int | list[NamedTensor]
"""One of the kit's two weight sets by its number, or other tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparableTokens:
    """Token ids and log-probs of a completion, which compare equal within a tolerance in nats."""

    ids: list[int]
    logprobs: list[float]
    tolerance: float

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ComparableTokens):
            return NotImplemented
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        return self.ids == other.ids and all(abs(a - b) <= self.tolerance for a, b in pairs)


class ServerHarness:
    """A server under test; see `Checks.connect`.

    Args:
        settings: The settings of the kit.
        channel: A channel to the server.
        info: The server's first answer to GetServerInfo.
    """

    def __init__(
        self, settings: KitSettings, channel: grpc.aio.Channel, info: srv.GetServerInfoResponse
    ) -> None:
        self.settings = settings
        self.channel = channel
        self.info = info
        self.stubs: Stubs = stubs_for(channel, settings.target.metadata)
        self._begun: list[str] = []

    @property
    def capabilities(self) -> srv.Capabilities:
        """The capabilities that the server reports."""
        return self.info.capabilities

    async def refresh(self) -> srv.GetServerInfoResponse:
        """Calls GetServerInfo and keeps the answer in `info`."""
        request = srv.GetServerInfoRequest(client="conformance")
        self.info = await self.stubs.control.GetServerInfo(request, timeout=CALL_S)
        return self.info

    def generate_request(self, **fields: Any) -> gen.GenerateRequest:
        """Returns a request for 8 tokens with a seed; `fields` override its values."""
        values: dict[str, Any] = {
            "request_id": f"conformance-{uuid.uuid4()}",
            "prompt_token_ids": [1, 2, 3],
            "sampling": gen.SamplingParams(max_tokens=8, temperature=1, seed=5, ignore_eos=True),
            "logprob_mode": gen.LOGPROB_MODE_SAMPLED,
        } | fields
        return gen.GenerateRequest(**values)

    async def generate(self, **fields: Any) -> list[gen.GenerateResponse]:
        """Returns the messages of one completion."""
        call = self.stubs.generation.Generate(self.generate_request(**fields), timeout=CALL_S)
        return [message async for message in call]

    async def refused_generate(self, **fields: Any) -> Refusal:
        """Returns the refusal of a completion that must be refused."""
        return await refusal(self.generate(**fields))

    async def pause(self, policy: "sync.InFlightPolicy" = sync.IN_FLIGHT_POLICY_DRAIN) -> None:
        """Pauses the server."""
        await self.stubs.control.Pause(srv.PauseRequest(in_flight=policy), timeout=CALL_S)

    async def resume(self) -> None:
        """Resumes the server."""
        await self.stubs.control.Resume(srv.ResumeRequest(), timeout=CALL_S)

    async def sample(self) -> ComparableTokens:
        """Samples a fixed prompt with a fixed seed."""
        sampling = gen.SamplingParams(max_tokens=16, temperature=1, seed=5, ignore_eos=True)
        messages = await self.generate(prompt_token_ids=range(1, 17), sampling=sampling)
        return ComparableTokens(
            ids=token_ids_of(messages),
            logprobs=[round(x, 4) for message in messages for x in message.tokens.logprobs],
            tolerance=max(1e-3, self.settings.tolerance),
        )

    def tensors(self, which: Weights = 1) -> list[NamedTensor]:
        """Returns a set of weights; skips the check if the kit has none."""
        if not isinstance(which, int):
            return which
        checkpoints = self.settings.target.checkpoints
        if checkpoints is None:
            pytest.skip("needs weights to send: set --model or --weights")
        return read_checkpoint(checkpoints[which])

    def begin_request(self, which: int = 1, **fields: Any) -> sync.BeginUpdateRequest:
        """Returns a staged inline update to the next version; `fields` override its values."""
        update_id = fields.pop("update_id", f"conformance-{uuid.uuid4()}")
        version = fields.pop("weight_version", self.info.weight_version + 1)
        request = begin_request(update_id, version, specs_of(self.tensors(which)))
        for name, value in fields.items():
            request.ClearField(name)
            if isinstance(value, list):
                getattr(request, name).extend(value)
            elif value is not None and hasattr(value, "DESCRIPTOR"):
                getattr(request, name).CopyFrom(value)
                getattr(request, name).SetInParent()
            elif value is not None:
                setattr(request, name, value)
        return request

    async def refused_begin(self, **fields: Any) -> tuple[sync.BeginUpdateRequest, Refusal]:
        """Begins an update that must be refused; returns the request and the refusal."""
        request = self.begin_request(**fields)
        self._begun.append(request.update_id)
        return request, await refusal(self.stubs.weights.BeginUpdate(request, timeout=CALL_S))

    async def begin(self, which: int = 1, **fields: Any) -> tuple[str, sync.BeginUpdateResponse]:
        """Begins an update and returns its id and the answer."""
        request = self.begin_request(which, **fields)
        self._begun.append(request.update_id)
        answer = await self.stubs.weights.BeginUpdate(request, timeout=CALL_S)
        return request.update_id, answer

    async def push(self, update_id: str, which: Weights = 1) -> sync.PushWeightsResponse:
        """Pushes a whole set of weights."""
        tensors = self.tensors(which)
        messages = push_messages(update_id, specs_of(tensors), stream(tensors), 1 << 20)
        answer = await self.stubs.weights.PushWeights(messages, timeout=10 * CALL_S)
        assert isinstance(answer, sync.PushWeightsResponse)
        return answer

    async def push_chunks(self, update_id: str, *chunks: sync.WeightChunk) -> object:
        """Pushes chunks in one stream."""
        header = sync.PushWeightsRequest(header=sync.PushHeader(update_id=update_id))
        messages = [header, *(sync.PushWeightsRequest(chunk=chunk) for chunk in chunks)]
        return await self.stubs.weights.PushWeights(messages, timeout=CALL_S)

    async def commit(
        self, update_id: str, policy: "sync.InFlightPolicy" = sync.IN_FLIGHT_POLICY_DRAIN
    ) -> int:
        """Commits an update and returns the version that serves."""
        request = sync.CommitUpdateRequest(update_id=update_id, in_flight=policy)
        answer = await self.stubs.weights.CommitUpdate(request, timeout=10 * CALL_S)
        return int(answer.weight_version)

    async def update(self, which: Weights = 1, **fields: Any) -> int:
        """Makes one whole update and returns the version that serves."""
        update_id, _ = await self.begin(**fields)
        await self.push(update_id, which)
        version = await self.commit(update_id)
        await self.refresh()
        return version

    async def update_and_sample(self, which: Weights) -> ComparableTokens:
        """Makes one whole update and samples afterwards."""
        await self.update(which)
        return await self.sample()

    async def push_shared_memory(
        self,
        update_id: str,
        data: Sequence[bytes | memoryview],
        buckets: Sequence[Sequence[Part]] | None = None,
        *,
        num_slots: int = 2,
    ) -> None:
        """Pushes tensors by shared memory, one part per tensor unless `buckets` cuts them."""
        room = max(len(tensor) for tensor in data)
        segment = SharedSegment(update_id, num_slots=num_slots, slot_bytes=room)
        if buckets is None:
            buckets = whole_tensors(data, room)
        slots = await push_segment(
            self.stubs.weights, segment, data, buckets, timeout_s=10 * CALL_S
        )
        assert len(slots) == len(buckets) + 1, (
            f"{len(buckets)} buckets were sent, but the slots given back are {slots}"
        )

    async def read_bucket_response(self, *requests: sync.PushBucketsRequest) -> object:
        """Returns the first answer to a stream of buckets, or raises its refusal."""
        call = self.stubs.weights.PushBuckets([*requests, LAST], timeout=CALL_S)
        try:
            return await call.read()
        finally:
            call.cancel()

    async def require_shared_memory(self) -> None:
        """Skips the check if the server cannot read this process's memory.

        A server with a loopback address is assumed to be on this host.
        """
        if not self.capabilities.shared_memory_transport:
            pytest.skip("the server reads no shared memory")
        if not hasattr(os, "memfd_create"):
            pytest.skip("run the kit on Linux: this system has no memfd")
        if self.settings.on_loopback:
            return
        update_id, _ = await self.begin(**SHARED)
        try:
            await self.read_bucket_response(SharedSegment(update_id).header())
            await self.abort(update_id)
        except grpc.aio.AioRpcError as error:
            pytest.skip(f"run the kit on the server's host: {read_refusal(error).message}")

    async def abort(self, update_id: str) -> None:
        """Aborts an update."""
        request = sync.AbortUpdateRequest(update_id=update_id)
        await self.stubs.weights.AbortUpdate(request, timeout=CALL_S)

    async def received_bytes(self, update_id: str) -> list[int]:
        """Returns the number of bytes per tensor that the server holds (GetUpdate)."""
        request = sync.GetUpdateRequest(update_id=update_id)
        answer = await self.stubs.weights.GetUpdate(request, timeout=CALL_S)
        return list(answer.received_bytes)

    async def restore(self) -> None:
        """Makes the server serve again."""
        for update_id in self._begun:
            with suppress(grpc.aio.AioRpcError):  # Most have already ended.
                await self.abort(update_id)
        info = await self.refresh()
        if info.state == srv.SERVER_STATE_LOADING:
            update_id, _ = await self.begin(0)
            await self.push(update_id, 0)
            await self.commit(update_id)
            info = await self.refresh()
        if info.state == srv.SERVER_STATE_PAUSED:
            if info.capabilities.release_memory:
                restore = srv.RestoreMemoryRequest(kinds=_KINDS)
                await self.stubs.control.RestoreMemory(restore, timeout=CALL_S)
            await self.resume()


class Checks:
    """Base class of the checks that talk to the server message by message."""

    settings: KitSettings

    @pytest.fixture(autouse=True)
    def _take_settings(self, settings: KitSettings) -> None:
        self.settings = settings

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ServerHarness]:
        """Yields the server, which serves now and again afterwards."""
        target = self.settings.target
        async with target.channel(target.address) as channel:
            stubs = stubs_for(channel, target.metadata)
            request = srv.GetServerInfoRequest(client="conformance")
            server = ServerHarness(
                self.settings, channel, await stubs.control.GetServerInfo(request, timeout=CALL_S)
            )
            try:
                yield server
            finally:
                await server.restore()


def chunk_of(
    tensors: Sequence[NamedTensor],
    index: int,
    offset: int,
    length: int,
    *,
    crc32: int | None = None,
) -> sync.WeightChunk:
    """Returns a chunk of one tensor, with its checksum unless `crc32` is another."""
    data = bytes(tensors[index].data[offset : offset + length])
    return sync.WeightChunk(
        tensor_index=index,
        offset=offset,
        data=data,
        crc32=zlib.crc32(data) if crc32 is None else crc32,
    )


async def remaining_messages(call: Any) -> list[gen.GenerateResponse]:
    """Reads a stream to its end and returns the messages."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def token_ids_of(messages: Sequence[gen.GenerateResponse]) -> list[int]:
    """Returns the token ids of all messages."""
    return [i for message in messages for i in message.tokens.token_ids]
