"""The shared-memory segment of a sender, which a server on the same host reads.

Invariant: a slot is written before its bucket is sent, and written again only after the server has
given it back. A slot that comes back is overwritten completely, so that a server that still reads
from it reads other data. `push_segment` waits for free slots.
"""

import asyncio
import fcntl
import mmap
import os
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from treadle.rollout.v1 import weight_sync_service_pb2 as sync

PAGE = 4096
LAST = sync.PushBucketsRequest(bucket=sync.Bucket(slot=99))
"""The bucket that ends a stream."""
Part = tuple[int, int, int]
"""Tensor, offset, length."""


class SharedSegment:
    """A page that names the update, then slots of equal size.

    Args:
        update_id: The update whose bytes it will hold.
        slot_bytes: Size of a slot, rounded up to whole pages.
        sealed: Whether it is sealed against shrinking, as the contract requires.
    """

    def __init__(
        self,
        update_id: str = "u",
        *,
        num_slots: int = 2,
        slot_bytes: int = PAGE,
        name: str = "treadle-test",
        sealed: bool = True,
    ) -> None:
        self.update_id = update_id
        self.num_slots = num_slots
        self.slot_bytes = -(-slot_bytes // PAGE) * PAGE
        self.num_bytes = PAGE + num_slots * self.slot_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.num_bytes)
        if sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._map = mmap.mmap(self.fd, self.num_bytes)
        self._map[: len(update_id)] = update_id.encode()

    def header(self, **fields: Any) -> sync.PushBucketsRequest:
        """Returns the first message of a stream; `fields` override its values."""
        values: dict[str, Any] = {
            "update_id": self.update_id,
            "pid": os.getpid(),
            "fd": self.fd,
            "num_bytes": self.num_bytes,
        } | fields
        return sync.PushBucketsRequest(header=sync.BucketsHeader(**values))

    def fill(
        self, slot: int, data: Sequence[bytes | memoryview], *parts: Part
    ) -> sync.PushBucketsRequest:
        """Writes parts of tensors into a slot, one after another, then zeros.

        Args:
            data: Bytes of each announced tensor.

        Returns:
            The message that announces the bucket.
        """
        bucket = sync.Bucket(slot=slot)
        start = PAGE + slot * self.slot_bytes
        stop = start + self.slot_bytes
        for index, offset, length in parts:
            assert start + length <= stop, "the slot is too small"
            self._map[start : start + length] = bytes(data[index][offset : offset + length])
            bucket.parts.add(tensor_index=index, offset=offset, length=length, start=start)
            start += length
        self._map[start:stop] = bytes(stop - start)
        return sync.PushBucketsRequest(bucket=bucket)


def whole_tensors(data: Sequence[bytes | memoryview], slot_bytes: int) -> list[list[Part]]:
    """Returns the parts of each bucket without splitting tensors; a slot must fit the largest."""
    buckets: list[list[Part]] = []
    room = 0
    for index, tensor in enumerate(data):
        if not len(tensor):
            continue
        if len(tensor) > room:
            buckets.append([])
            room = slot_bytes
        buckets[-1].append((index, 0, len(tensor)))
        room -= len(tensor)
    return buckets


async def push_segment(
    weights: Any,
    segment: SharedSegment,
    data: Sequence[bytes | memoryview],
    buckets: Iterable[Sequence[Part]],
    *,
    timeout_s: float,
) -> list[int]:
    """Sends buckets, each in the slot that has been free longest; returns the slots given back.

    Args:
        segment: The segment of the update.
        data: Bytes of each announced tensor.
        buckets: Parts of each bucket, none of them empty.
        timeout_s: Deadline of the whole stream.
    """
    free: asyncio.Queue[int] = asyncio.Queue()
    for slot in range(segment.num_slots):
        free.put_nowait(slot)

    async def requests() -> AsyncIterator[sync.PushBucketsRequest]:
        yield segment.header()
        for parts in buckets:
            yield segment.fill(await free.get(), data, *parts)
        for _ in range(segment.num_slots):  # All slots have come back.
            await free.get()
        yield LAST

    given_back: list[int] = []
    async for answer in weights.PushBuckets(requests(), timeout=timeout_s):
        given_back.append(answer.slot)
        if answer.slot != LAST.bucket.slot:
            assert answer.slot < segment.num_slots, (
                f"slot {answer.slot} came back but does not exist"
            )
            segment.fill(answer.slot, data)
            free.put_nowait(answer.slot)
    return given_back
