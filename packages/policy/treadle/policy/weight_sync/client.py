"""The control side of one server: Begin, Get, Commit, Abort; pause and memory; the handshake.

The policy's ranks send the bytes themselves (`transports/`). Every call has a deadline. A failure
is a `WeightSyncError` that names the remedy.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, TypeVar

import grpc
from google.protobuf.message import Message

from treadle.agent_loop.rpc import ChannelSecurity
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError, explain
from treadle.rollout.v1 import server_service_pb2 as server_pb
from treadle.rollout.v1 import server_service_pb2_grpc as server_grpc
from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout.v1 import weight_sync_service_pb2_grpc as pb_grpc

__all__ = ["Memory", "WeightSyncClient", "with_retries"]

Memory = Literal["weights", "kv_cache"]
"""Device memory that a server can release."""
_KINDS: dict[Memory, server_pb.MemoryKind] = {
    "weights": server_pb.MEMORY_KIND_WEIGHTS,
    "kv_cache": server_pb.MEMORY_KIND_KV_CACHE,
}

T = TypeVar("T")


async def with_retries(call: Callable[[], Awaitable[T]], *, max_attempts: int) -> T:
    """Makes an idempotent call, and again only if the answer got lost.

    Raises:
        WeightSyncError: The call failed in another way, or `max_attempts` answers got lost.
    """
    for _ in range(max_attempts - 1):
        try:
            return await call()
        except WeightSyncError as error:
            if error.outcome is not Outcome.RESUME:
                raise
    return await call()


class WeightSyncClient:
    """One server; errors name it as `name (address)`."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        control_deadline_s: float,
        commit_deadline_s: float,
        security: ChannelSecurity | None = None,
    ) -> None:
        """Opens a channel without a call.

        Args:
            control_deadline_s: Maximum time for a call that changes or reads the state.
            commit_deadline_s: Maximum time for a call that waits for completions or for the engine.
            security: How the server is reached; None: in plain text.

        Raises:
            SetupError: A token would be sent in plain text.
        """
        self.name = name
        self.address = address
        self._control_s = control_deadline_s
        self._commit_s = commit_deadline_s
        security = security or ChannelSecurity()
        self._channel = security.open(address)
        self._metadata = security.metadata
        self._sync = pb_grpc.WeightSyncServiceStub(self._channel)
        self._server = server_grpc.ServerServiceStub(self._channel)

    async def info(self) -> server_pb.GetServerInfoResponse:
        """Returns what the server is and holds."""
        request = server_pb.GetServerInfoRequest(client="treadle-trainer")
        return await self._call(
            "GetServerInfo", self._server.GetServerInfo, request, self._control_s
        )

    async def pause(self, *, interrupt: bool) -> None:
        """Stops generation; interrupts in-flight completions or lets them finish. Idempotent."""
        request = server_pb.PauseRequest(
            in_flight=pb.IN_FLIGHT_POLICY_INTERRUPT if interrupt else pb.IN_FLIGHT_POLICY_DRAIN
        )
        await self._call("Pause", self._server.Pause, request, self._commit_s)

    async def resume(self) -> None:
        """Starts generation. Idempotent."""
        request = server_pb.ResumeRequest()
        await self._call("Resume", self._server.Resume, request, self._control_s)

    async def release_memory(self, kinds: Iterable[Memory]) -> None:
        """Releases device memory of a paused server. Idempotent."""
        request = server_pb.ReleaseMemoryRequest(kinds=[_KINDS[kind] for kind in kinds])
        await self._call("ReleaseMemory", self._server.ReleaseMemory, request, self._commit_s)

    async def restore_memory(self, kinds: Iterable[Memory]) -> None:
        """Restores device memory. Idempotent."""
        request = server_pb.RestoreMemoryRequest(kinds=[_KINDS[kind] for kind in kinds])
        await self._call("RestoreMemory", self._server.RestoreMemory, request, self._commit_s)

    async def begin(self, request: pb.BeginUpdateRequest) -> pb.BeginUpdateResponse:
        """Opens or finds the update; the answer gives the bytes of each tensor that are held."""
        # Before it answers, a server reads files, or ends its completions for an update in place.
        # Either may take as long as a commit.
        long = request.HasField("file") or request.HasField("in_place")
        deadline_s = self._commit_s if long else self._control_s
        return await self._call("BeginUpdate", self._sync.BeginUpdate, request, deadline_s)

    async def received(self, update_id: str) -> tuple[int, ...]:
        """Returns the bytes held of each tensor; renews the lease."""
        request = pb.GetUpdateRequest(update_id=update_id)
        response = await self._call("GetUpdate", self._sync.GetUpdate, request, self._control_s)
        return tuple(response.received_bytes)

    async def commit(self, update_id: str, in_flight: pb.InFlightPolicy) -> int:
        """Switches to the new weights and returns the version."""
        request = pb.CommitUpdateRequest(update_id=update_id, in_flight=in_flight)
        response = await self._call(
            "CommitUpdate", self._sync.CommitUpdate, request, self._commit_s
        )
        return int(response.weight_version)

    async def abort(self, update_id: str) -> None:
        """Drops the update."""
        request = pb.AbortUpdateRequest(update_id=update_id)
        await self._call("AbortUpdate", self._sync.AbortUpdate, request, self._control_s)

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def _call(
        self, name: str, method: Callable[..., Awaitable[T]], request: Message, deadline_s: float
    ) -> T:
        try:
            return await method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            server = f"{self.name} ({self.address})"
            raise explain(error, server=server, call=name) from None
