"""The sender of a collective group: rank 0 with its store, which broadcasts to the workers.

Invariant: it follows `docs/protocol.md` and never waits for a member that has left. Every wait ends
at the group's timeout, or when a member reports that the group failed.

Needs torch, so it is imported only where it is needed. All methods block; call them in a thread.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from treadle.rollout.collective_schedule import schedule
from treadle.rollout_server.engine import CollectiveGroup, NamedTensor

_DIST: Any = dist  # torch does not declare what is used of it.
_BUCKET_BYTES = 4096
_POLL_S = 0.01


class TensorBroadcaster:
    """The only sender of a group.

    Args:
        tensors: The tensors of each update; their values may differ per update.
        num_workers: Number of workers that take part.
        host: The address of this machine as the workers reach it.
        absent: Number of workers that are counted but never join.
        timeout_s: Maximum wait for a member or a broadcast.
    """

    def __init__(
        self,
        tensors: Sequence[NamedTensor],
        *,
        num_workers: int = 1,
        host: str = "127.0.0.1",
        absent: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._store = _DIST.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._host = host
        self._backend: Any = None
        self.group = CollectiveGroup(
            backend="gloo",
            rendezvous=f"{host}:{self._store.port}",
            group_name="g",
            world_size=1 + num_workers + absent,
            first_rank=1,
            bucket_bytes=_BUCKET_BYTES,
            senders=(0,) * len(tensors),
        )
        self.keys = _DIST.PrefixStore("g", self._store)
        self.keys.set("timeout_s", str(timeout_s))

    def send(self, tensors: Sequence[NamedTensor], *, num_buckets: int | None = None) -> None:
        """Broadcasts one update, or its first `num_buckets`, and waits until it is written.

        Raises:
            RuntimeError: A member did not come, left, or took too long.
        """
        backend = self._joined()
        sizes = [tensor.spec.size_bytes for tensor in tensors]
        options = _DIST.BroadcastOptions()
        for bucket in schedule(sizes, self.group.senders, _BUCKET_BYTES)[:num_buckets]:
            flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for part in bucket.parts:
                data = torch.frombuffer(tensors[part.index].data, dtype=torch.uint8)
                flat[part.start : part.start + part.num_bytes] = data
            backend.broadcast([flat], options).wait()
        if num_buckets is None:
            answers = list(torch.zeros(self.group.world_size, 1, dtype=torch.uint8))
            backend.gather([answers], [torch.zeros(1, dtype=torch.uint8)]).wait()

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._backend = None

    def leave(self, cause: str) -> None:
        """Ends the group for all its members."""
        self.keys.set("failed", f"rank 0: {cause}")

    def _joined(self) -> Any:
        if self._backend is None:
            self.keys.set("here/0", b"")
            deadline = time.monotonic() + self._timeout.total_seconds()
            while not self.keys.check([f"here/{rank}" for rank in range(self.group.world_size)]):
                if self.keys.check(["failed"]) or time.monotonic() > deadline:
                    raise RuntimeError("not all members came")
                time.sleep(_POLL_S)
            options = _DIST.ProcessGroupGloo._Options()
            options._timeout = self._timeout
            options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=self._host)]
            store = _DIST.PrefixStore("0", self.keys)
            self._backend = _DIST.ProcessGroupGloo(store, 0, self.group.world_size, options)
        return self._backend
