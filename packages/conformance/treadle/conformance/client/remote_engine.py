"""The remote engine: any rollout server behind the `Engine` protocol.

Invariant: `info`, `weight_version` and `counters` are the server's values when the last call ended;
every call except an unfinished `generate` refreshes them.

Where a server refuses a sequence, an `Engine` makes it wait. While this engine keeps the server
paused, a refused sequence waits for `resume`. If the queue is full, the sequence is retried after
the server's delay, for up to ten minutes, because no check may depend on the size of the queue.

The server outlives the engine: `aclose` only ends the calls of this engine.
"""

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle.conformance.client.refusals import Refused, as_exception
from treadle.conformance.client.remote_messages import (
    IN_FLIGHT,
    MEMORY_KINDS,
    begin_request,
    decode_event,
    encode_group,
    encode_request,
    push_messages,
    read_info,
)
from treadle.conformance.client.stubs import Stubs, stubs_for
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import (
    CollectiveGroup,
    EngineCounters,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    InFlightPolicy,
    MemoryKind,
    NamedTensor,
    TensorSpec,
)
from treadle.rollout_server.errors import EngineFailed

CALL_S = 60.0
"""Deadline of short calls; longer ones get a multiple of it."""


class RemoteEngine:
    """See the module docstring; created by `connect_engine`.

    Args:
        health: Stub of its health service.
        info: Its first answer to GetServerInfo.
        parameters: The tensors that an update must bring, if known.
    """

    def __init__(
        self,
        stubs: Stubs,
        health: Any,
        info: srv.GetServerInfoResponse,
        parameters: tuple[TensorSpec, ...] | None,
    ) -> None:
        self._stubs = stubs
        self._health = health
        self._parameters = parameters
        self._policy = (
            InFlightPolicy.DRAIN
        )  # The policy of the last pause, for a commit while paused.
        self._pauses = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._names = itertools.count()
        self._calls: set[Any] = set()
        self._closed = False
        self.server = info

    @property
    def info(self) -> EngineInfo:
        """The server's description of itself."""
        return read_info(self.server, self._parameters)

    @property
    def weight_version(self) -> int:
        """The version that served when the last call ended."""
        return int(self.server.weight_version)

    @property
    def counters(self) -> EngineCounters:
        """The counters since the server started, when the last call ended."""
        load = self.server.load
        return EngineCounters(
            started=load.started, finished=load.finished, aborted=load.aborted, running=load.running
        )

    async def refresh(self) -> srv.GetServerInfoResponse:
        """Calls GetServerInfo."""
        request = srv.GetServerInfoRequest(client="conformance")
        self.server = await self._stubs.control.GetServerInfo(request, timeout=CALL_S)
        return self.server

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one sequence; see `Engine.generate`."""
        message = encode_request(request, f"{request.request_id}-{next(self._names)}")
        until = asyncio.get_running_loop().time() + 10 * CALL_S
        while True:
            began = False
            # Whether this engine paused the server; when a refusal arrives, the pause may be over.
            paused, pauses = not self._resumed.is_set(), self._pauses
            call = self._stubs.generation.Generate(message, timeout=10 * CALL_S)
            self._calls.add(call)
            try:
                async for response in call:
                    began = True
                    event = decode_event(response)
                    if isinstance(event, Finished):
                        await self.refresh()
                    yield event
                return
            except grpc.aio.AioRpcError as error:
                refused = as_exception(error)
                ours = paused or self._pauses != pauses
                wait_s = _full_for_s(refused)
                late = asyncio.get_running_loop().time() > until
                if began or late or (wait_s is None and not (ours and _is_pause(refused))):
                    raise refused from error
            finally:
                self._calls.discard(call)
                call.cancel()
            await asyncio.sleep(wait_s or 0)
            await self._resumed.wait()

    async def pause(self, policy: InFlightPolicy) -> None:
        """Pauses the server; see `Engine.pause`."""
        self._policy = policy
        self._pauses += 1
        self._resumed.clear()
        await self._control("Pause", srv.PauseRequest(in_flight=IN_FLIGHT[policy]))

    async def resume(self) -> None:
        """Resumes the server; see `Engine.resume`."""
        await self._control("Resume", srv.ResumeRequest())
        self._resumed.set()

    async def load_weights(
        self,
        tensors: AsyncIterator[NamedTensor],
        *,
        version: int,
        in_place: bool = False,
        in_flight: InFlightPolicy | None = None,
    ) -> None:
        """Makes one update over inline transport; see `Engine.load_weights`.

        With `in_flight`, the server pauses by itself, by that policy, for as long as the update
        needs it; else the policy is that of the last pause. In place, the tensors of `info` are
        announced and pushed as they come. Otherwise all tensors are read first, and exactly those
        are announced.
        """
        if in_flight is not None:
            self._policy = in_flight
        update_id = str(uuid.uuid4())
        held: list[NamedTensor] = []
        specs = self._parameters
        if not in_place or specs is None:
            held = [
                NamedTensor(spec=tensor.spec, data=memoryview(bytearray(tensor.data)))
                async for tensor in tensors
            ]
            specs = tuple(tensor.spec for tensor in held)
            tensors = _again(held)
        request = begin_request(update_id, version, specs)
        if in_place:
            request.in_place.in_flight = IN_FLIGHT[self._policy]

        async def push(begun: sync.BeginUpdateResponse) -> None:
            await self._push(push_messages(update_id, specs, tensors, begun.max_chunk_bytes))

        await self._update(request, push)

    async def receive_weights(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec], *, version: int
    ) -> None:
        """Makes one update over collective transport; see `Engine.receive_weights`."""
        request = begin_request(str(uuid.uuid4()), version, tensors)
        request.collective.CopyFrom(encode_group(group))
        request.in_place.in_flight = IN_FLIGHT[self._policy]
        await self._update(request)

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Releases memory; see `Engine.release_memory`."""
        wanted = [MEMORY_KINDS[kind] for kind in kinds]
        await self._control("ReleaseMemory", srv.ReleaseMemoryRequest(kinds=wanted))

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Restores memory; see `Engine.restore_memory`."""
        wanted = [MEMORY_KINDS[kind] for kind in kinds]
        await self._control("RestoreMemory", srv.RestoreMemoryRequest(kinds=wanted))

    async def wait_failed(self) -> Exception:
        """Returns when health is NOT_SERVING and the server FAILED; see `Engine`."""
        watch = self._health.Watch(health_pb2.HealthCheckRequest(), timeout=24 * 3600.0)
        try:
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    continue
                if (await self.refresh()).state == srv.SERVER_STATE_FAILED:
                    break
            return EngineFailed(self.server.engine, RuntimeError("the server is FAILED"))
        finally:
            watch.cancel()

    async def aclose(self) -> None:
        """Ends the calls of this engine and resumes the server. Idempotent."""
        for call in list(self._calls):
            call.cancel()
        if not self._closed:
            self._closed = True
            await self._restore()

    async def _update(
        self,
        request: sync.BeginUpdateRequest,
        push: Callable[[sync.BeginUpdateResponse], Awaitable[None]] | None = None,
    ) -> None:
        """Begins, pushes and commits an update; aborts it if any step fails."""
        weights = self._stubs.weights
        commit = sync.CommitUpdateRequest(
            update_id=request.update_id, in_flight=IN_FLIGHT[self._policy]
        )
        try:
            begun = await weights.BeginUpdate(request, timeout=CALL_S)
            if push is not None:
                await push(begun)
            await weights.CommitUpdate(commit, timeout=10 * CALL_S)
        except grpc.aio.AioRpcError as error:
            await self._abort(request.update_id)
            raise as_exception(error) from error
        except BaseException:
            await self._abort(request.update_id)
            raise
        await self.refresh()

    async def _push(self, messages: AsyncIterator[sync.PushWeightsRequest]) -> None:
        """Writes message by message, because gRPC hides what an iterator raises."""
        call = self._stubs.weights.PushWeights(timeout=10 * CALL_S)
        try:
            async for message in messages:
                try:
                    await call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    break  # The server ended the call; its answer says why.
            await call.done_writing()
            await call
        finally:
            call.cancel()

    async def _restore(self) -> None:
        """Resumes a server that a failed test left paused."""
        if (await self.refresh()).state == srv.SERVER_STATE_PAUSED:
            if self.server.capabilities.release_memory:
                await self.restore_memory(frozenset(MemoryKind))
            await self.resume()

    async def _control(self, name: str, request: object) -> None:
        try:
            await getattr(self._stubs.control, name)(request, timeout=10 * CALL_S)
        except grpc.aio.AioRpcError as error:
            raise as_exception(error) from error
        await self.refresh()

    async def _abort(self, update_id: str) -> None:
        request = sync.AbortUpdateRequest(update_id=update_id)
        try:
            await self._stubs.weights.AbortUpdate(request, timeout=CALL_S)
        except grpc.aio.AioRpcError:
            # Not begun, or the server is gone; the first error matters.
            return
        await self.refresh()


@asynccontextmanager
async def connect_engine(
    channel: grpc.aio.Channel,
    *,
    parameters: tuple[TensorSpec, ...] | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> AsyncIterator[RemoteEngine]:
    """Yields the engine of a server.

    Args:
        channel: A channel to the server; stays open.
        parameters: The tensors that an update must bring; see `EngineInfo.parameters`.
        metadata: Metadata of every call, such as a bearer token.
    """
    stubs = stubs_for(channel, metadata)
    health = health_pb2_grpc.HealthStub(channel)
    request = srv.GetServerInfoRequest(client="conformance")
    info = await stubs.control.GetServerInfo(request, timeout=CALL_S)
    engine = RemoteEngine(stubs, health, info, parameters)
    try:
        yield engine
    finally:
        await engine.aclose()


async def _again(held: Sequence[NamedTensor]) -> AsyncIterator[NamedTensor]:
    for tensor in held:
        yield tensor


def _is_pause(error: Exception) -> bool:
    return isinstance(error, Refused) and error.refusal.reason == "PAUSED"


def _full_for_s(error: Exception) -> float | None:
    """Returns the delay after which to retry if the queue is full; None for other errors."""
    if not isinstance(error, Refused) or error.refusal.reason != "OVERLOADED":
        return None
    delay = error.refusal.detail(error_details_pb2.RetryInfo).retry_delay
    return float(delay.ToTimedelta().total_seconds())
