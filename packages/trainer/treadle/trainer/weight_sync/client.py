"""The control side of weight sync with one server: Begin, Get, Commit, Abort, and the handshake.

The bytes themselves come from the policy's ranks (`inline`, `file`). Every call has a deadline;
a failure is a `WeightSyncError` that says what to do.
"""

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf import duration_pb2

from treadle.rollout.v1 import server_service_pb2 as server_pb
from treadle.rollout.v1 import server_service_pb2_grpc as server_grpc
from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout.v1 import weight_sync_service_pb2_grpc as pb_grpc
from treadle.trainer.weight_sync.errors import explain
from treadle.trainer.weight_sync.inline import CHANNEL_OPTIONS

__all__ = ["WeightSyncClient"]

T = TypeVar("T")


class WeightSyncClient:
    """One server, named in errors as `name (address)`."""

    def __init__(
        self, name: str, address: str, *, control_deadline_s: float, commit_deadline_s: float
    ) -> None:
        self.name = name
        self.address = address
        self._control_s = control_deadline_s
        self._commit_s = commit_deadline_s
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._sync = pb_grpc.WeightSyncServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._server = server_grpc.ServerServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def info(self) -> server_pb.GetServerInfoResponse:
        """What the server is and holds."""
        request = server_pb.GetServerInfoRequest(client="treadle-trainer")
        return await self._call(
            "GetServerInfo", self._server.GetServerInfo(request, timeout=self._control_s)
        )

    async def begin(
        self,
        update_id: str,
        version: int,
        tensors: Sequence[pb.TensorSpec],
        *,
        lease_s: float,
        directory: Path | None = None,
        crc32: Sequence[int] = (),
    ) -> pb.BeginUpdateResponse:
        """Opens the update; with a directory its bytes are files there, else they are pushed."""
        lease = duration_pb2.Duration()
        lease.FromMilliseconds(round(lease_s * 1000))
        request = pb.BeginUpdateRequest(
            update_id=update_id, weight_version=version, tensors=tensors, lease=lease
        )
        if directory is None:
            request.inline.SetInParent()
        else:
            request.file.directory = str(directory)
            request.file.crc32.extend(crc32)
        # The server reads files before it answers, so this may take as long as a commit.
        deadline_s = self._control_s if directory is None else self._commit_s
        return await self._call("BeginUpdate", self._sync.BeginUpdate(request, timeout=deadline_s))

    async def received(self, update_id: str) -> tuple[int, ...]:
        """Bytes held of each tensor; renews the lease."""
        request = pb.GetUpdateRequest(update_id=update_id)
        response = await self._call(
            "GetUpdate", self._sync.GetUpdate(request, timeout=self._control_s)
        )
        return tuple(response.received_bytes)

    async def commit(self, update_id: str) -> int:
        """Switches to the new weights once running completions have ended; the version."""
        request = pb.CommitUpdateRequest(update_id=update_id, in_flight=pb.IN_FLIGHT_POLICY_DRAIN)
        response = await self._call(
            "CommitUpdate", self._sync.CommitUpdate(request, timeout=self._commit_s)
        )
        return int(response.weight_version)

    async def abort(self, update_id: str) -> None:
        """Drops the update."""
        request = pb.AbortUpdateRequest(update_id=update_id)
        await self._call("AbortUpdate", self._sync.AbortUpdate(request, timeout=self._control_s))

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def _call(self, name: str, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.RpcError as error:
            server = f"{self.name} ({self.address})"
            raise explain(error, server=server, call=name) from None
