"""Shared memory transport: each rank fills slots of its segment; the servers of its host read them.

Data flow: the driver begins the update on all servers. Each rank copies its weights into the slots
of its segment, in turn, and sends the servers the weight and the place of each part
(`PushBuckets`). A server reads a bucket and gives its slot back. The driver commits when the ranks
have received every slot back.

Who waits for whom: a rank waits for a free slot, and so for its slowest server. A thread per server
receives the slots given back until its stream ends, at the latest by its deadline. A stream that
breaks ends the rank's wait for its server; it is reported and the others continue. A broken push is
not resumed, because its server may have read a slot while it was filled again: the server gets
everything again, under another update, while the others already commit.

Invariants: a slot is filled again only when every server that is left has given it back, so each
weight is copied once, from the parameter into the slot, for any number of servers. Beyond the
weights a rank holds `NUM_SLOTS` slots of a bucket each. Where an engine takes whole tensors only, a
slot is at least as large as the rank's largest weight.

There is no checksum: a server reads the very pages that the rank wrote. What can go wrong (another
segment; a bucket that is repeated, out of order or missing) shows in the segment's first page and
in the tensor, offset and length of each part.
"""

import fcntl
import logging
import mmap
import os
import threading
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc

from treadle.policy.config.weight_sync import SharedMemoryTransportConfig
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError, explain
from treadle.policy.weight_sync.payload import WeightSource, num_bytes, own_weights
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.policy.weight_sync.transports.chunk_queue import ChunkQueue
from treadle.policy.weight_sync.update_round import UpdateRound
from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout.v1 import weight_sync_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NUM_SLOTS", "Segment", "SharedMemorySender", "Slots", "publish_shared_memory"]

NUM_SLOTS = 2
_ALIGNMENT = 64  # a cache line; enough for every element type
_PAGE = 4096
_SEGMENT_NAME = "treadle-weights"
_log = logging.getLogger(__name__)


# --- the driver's side ---------------------------------------------------------------------------


async def publish_shared_memory(
    update_round: UpdateRound, transport: SharedMemoryTransportConfig
) -> None:
    """Leaves in `update_round.live` the servers that sample from the version."""
    waiting = dict(update_round.live)
    done: dict[str, WeightSyncClient] = {}
    for attempt in range(update_round.config.max_push_attempts):
        update_round.update_id = uuid.uuid4().hex
        update_round.live = waiting
        last = attempt + 1 == update_round.config.max_push_attempts
        waiting = await _push(update_round, transport.bucket_bytes, last=last)
        await update_round.commit()
        done |= update_round.live
        if not waiting:
            break
    update_round.live = done


async def _push(
    update_round: UpdateRound, bucket_bytes: int, *, last: bool
) -> dict[str, WeightSyncClient]:
    """Begins the update and has the ranks push; returns the servers to begin again."""
    request = update_round.begin_request()
    request.shared_memory.SetInParent()
    begun = await update_round.begin(request)
    push = weights_pb.PushSharedMemoryRequest(
        update_id=update_round.update_id,
        element_type=update_round.element_type,
        targets=(
            weights_pb.SharedMemoryTarget(name=name, address=server.address)
            for name, server in update_round.live.items()
        ),
        bucket_bytes=bucket_bytes,
        deadline_s=update_round.send_deadline_s,
        # Only an update in place hands parts to the engine, which may take whole tensors only.
        split_tensors=not request.HasField("in_place")
        or all(answer.split_tensors for answer in begun.values()),
        security=update_round.security.message(),
    )
    async with update_round.renewing_leases():
        reports: list[weights_pb.PushSharedMemoryResponse]
        reports = await update_round.policy.call(push)
    return await _remove_broken(update_round, reports, last=last)


async def _remove_broken(
    update_round: UpdateRound, reports: list[weights_pb.PushSharedMemoryResponse], *, last: bool
) -> dict[str, WeightSyncClient]:
    """Removes the servers whose push broke from the round; returns those that may try again."""
    incompatible = {name for report in reports for name in report.incompatible}
    errors: Mapping[str, str] = {n: e for report in reports for n, e in report.errors.items()}
    again = [name for name in errors if not last and name not in incompatible]
    outcomes = {
        name: Outcome.FATAL if name in incompatible else Outcome.REPLACE
        for name in errors
        if name not in again
    }
    await update_round.remove_failed(
        {n: WeightSyncError(errors[n], outcome) for n, outcome in outcomes.items()}
    )
    for name in again:
        _log.warning("version %d: pushing again: %s", update_round.version, errors[name])
    return await update_round.take_out(again)


# --- the rank's side -----------------------------------------------------------------------------


class SharedMemorySender:
    """A rank's end of the transport. Keeps its segment from update to update."""

    def __init__(self) -> None:
        self._segment: Segment | None = None

    def push(
        self, policy: WeightSource, request: weights_pb.PushSharedMemoryRequest, *, rank: int
    ) -> weights_pb.PushSharedMemoryResponse:
        """Hands this rank's weights to every target. Every rank must call it.

        The weights are exported even if this rank sends none or no target is left, because the
        export is collective.

        Raises:
            OSError: There is not enough memory for the segment.
        """
        specs = policy.weight_specs()
        weights = own_weights(policy, specs, rank)
        lengths = [num_bytes(spec, request.element_type) for spec in specs]
        own = [n for n, spec in zip(lengths, specs, strict=True) if spec.sender == rank]
        if not own:
            for _ in weights:
                pass
            return weights_pb.PushSharedMemoryResponse()
        whole = 0 if request.split_tensors else max(own)
        segment = self._segment_of(max(request.bucket_bytes, whole))
        segment.name_update(request.update_id)
        slots = Slots(segment.num_slots, [target.name for target in request.targets])
        streams = [_Stream(target, request, segment, slots) for target in request.targets]
        filler = _Filler(segment, slots, streams, request)
        try:
            for index, named in weights:
                filler.put(index, named.tensor, lengths[index])
            filler.finish()
        finally:
            for stream in streams:
                stream.join()
        broken = {stream.target.name: stream.error for stream in streams if stream.error}
        if broken:
            self._segment = None  # a server that was left behind may still read it
        return weights_pb.PushSharedMemoryResponse(
            num_bytes=filler.num_bytes,
            errors={name: str(error) for name, error in broken.items()},
            incompatible=tuple(n for n, error in broken.items() if error.outcome is Outcome.FATAL),
        )

    def _segment_of(self, slot_bytes: int) -> "Segment":
        if self._segment is None or self._segment.slot_bytes < slot_bytes:
            self._segment = None  # frees its memory before more is allocated
            self._segment = Segment(num_slots=NUM_SLOTS, slot_bytes=slot_bytes)
        return self._segment


class _Stream:
    """One PushBuckets call to one server, in its own thread."""

    def __init__(
        self,
        target: weights_pb.SharedMemoryTarget,
        request: weights_pb.PushSharedMemoryRequest,
        segment: "Segment",
        slots: "Slots",
    ) -> None:
        self.target = target
        self.error: WeightSyncError | None = None
        self._deadline_s = request.deadline_s
        self._security = ServerSecurity.of(request.security)
        self._slots = slots
        # Room for the header and one bucket per slot, so that `put` never waits.
        self._queue: ChunkQueue[pb.PushBucketsRequest] = ChunkQueue(1 + segment.num_slots)
        header = pb.BucketsHeader(
            update_id=request.update_id,
            pid=os.getpid(),
            fd=segment.fd,
            num_bytes=segment.num_bytes,
        )
        self._queue.put(pb.PushBucketsRequest(header=header))
        self._thread = threading.Thread(target=self._run, name=f"share-{target.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            security = self._security.read()
            with security.open_blocking(self.target.address) as channel:
                stub = pb_grpc.WeightSyncServiceStub(channel)
                responses = stub.PushBuckets(
                    self._queue, timeout=self._deadline_s, metadata=security.metadata
                )
                for response in responses:
                    self._slots.give_back(self.target.name, response.slot)
        except grpc.RpcError as error:
            self.error = explain(error, server=self.target.name, call="PushBuckets")
        except (OSError, ValueError) as error:  # an unreadable token; a slot it was not reading
            message = f"{self.target.name}: PushBuckets: {error}"
            self.error = WeightSyncError(message, Outcome.REPLACE)
        finally:
            self._queue.close()
            self._slots.remove_reader(self.target.name)

    def send(self, bucket: pb.Bucket) -> None:
        """Sends a bucket, unless the stream has broken."""
        self._queue.put(pb.PushBucketsRequest(bucket=bucket))

    def join(self) -> None:
        """Waits until the server has answered or the stream has broken."""
        self._queue.finish()
        self._thread.join()


class _Filler:
    """Packs weights into the slots in turn and sends each slot when it is full.

    A slot is full when it has no room for the next weight or, where weights are split, when it
    holds a bucket. A slot that is larger for the sake of one weight is not filled beyond a bucket
    otherwise: the servers would only wait longer for it.
    """

    def __init__(
        self,
        segment: "Segment",
        slots: "Slots",
        streams: Sequence[_Stream],
        request: weights_pb.PushSharedMemoryRequest,
    ) -> None:
        self.num_bytes = 0
        self._bucket_bytes = _aligned(request.bucket_bytes)
        self._element_type = request.element_type
        self._split = request.split_tensors
        self._segment = segment
        self._slots = slots
        self._streams = streams
        self._bucket = pb.Bucket(slot=0)
        self._used = 0

    def put(self, index: int, tensor: "Tensor", length: int) -> None:
        """Copies one weight of `length` bytes into the current slot and those after it."""
        flat = tensor.detach().reshape(-1)
        offset = 0
        while offset < length and self._slots.readers:
            num_bytes = self._room(length - offset)
            elements = slice(*(n * len(flat) // length for n in (offset, offset + num_bytes)))
            start = self._segment.start(self._bucket.slot) + self._used
            _copy_into(self._segment.view(start, num_bytes), flat[elements], self._element_type)
            self._bucket.parts.add(tensor_index=index, offset=offset, length=num_bytes, start=start)
            self._used += _aligned(num_bytes)
            offset += num_bytes
        self.num_bytes += offset

    def _room(self, wanted: int) -> int:
        """Returns the size of the next part, at most `wanted`, once its slot is free."""
        room = self._bucket_bytes - self._used
        if self._bucket.parts and room < (_ALIGNMENT if self._split else wanted):
            self.flush()
            room = self._bucket_bytes
        if not self._bucket.parts:
            self._slots.wait_until_free(self._bucket.slot)
        return min(room, wanted) if self._split else wanted

    def finish(self) -> None:
        """Sends what is left, and then an empty bucket, which marks the end."""
        if self._bucket.parts:
            self.flush()
        self._slots.wait_until_free(self._bucket.slot)
        self.flush()

    def flush(self) -> None:
        """Sends the current slot and moves on to the next one."""
        self._slots.hand_out(self._bucket.slot)
        for stream in self._streams:
            stream.send(self._bucket)
        self._bucket = pb.Bucket(slot=(self._bucket.slot + 1) % self._segment.num_slots)
        self._used = 0


class Slots:
    """Which server still reads which slot of a segment. All slots are free at first.

    Invariant: a slot is filled only when every reader that it was handed to has given it back or
    is gone. The rank waits in `wait_until_free`; the streams' threads wake it with `give_back` and
    `remove_reader`. The deadline of its stream removes a reader that does not answer.
    """

    def __init__(self, num_slots: int, readers: Iterable[str]) -> None:
        self._reading: list[set[str]] = [set() for _ in range(num_slots)]
        self._readers = set(readers)
        self._changed = threading.Condition()

    @property
    def readers(self) -> frozenset[str]:
        """The readers that are left."""
        with self._changed:
            return frozenset(self._readers)

    def wait_until_free(self, slot: int) -> None:
        """Waits until nobody reads the slot."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reading[slot])

    def hand_out(self, slot: int) -> None:
        """Marks the slot as being read by every reader that is left."""
        with self._changed:
            self._reading[slot] = set(self._readers)

    def give_back(self, reader: str, slot: int) -> None:
        """Marks the slot as no longer being read by this reader.

        Raises:
            ValueError: The reader was not reading the slot.
        """
        with self._changed:
            if not 0 <= slot < len(self._reading) or reader not in self._reading[slot]:
                raise ValueError(f"{reader} gave back slot {slot}, which it was not reading")
            self._reading[slot].remove(reader)
            self._changed.notify_all()

    def remove_reader(self, reader: str) -> None:
        """Removes a reader, which frees all its slots. Idempotent."""
        with self._changed:
            self._readers.discard(reader)
            for reading in self._reading:
                reading.discard(reader)
            self._changed.notify_all()


class Segment:
    """Memory of a rank that the servers of its host read: one page, then slots of equal size.

    Invariant: the segment keeps its size and cannot shrink (it is sealed), so that a reader never
    faults. Its first page names the update whose bytes the slots hold, so that a server does not
    mistake the segment of a process with the same number in another container for this one.

    It is a memfd: it has no path in a file system, fits where `/dev/shm` does not, and is freed
    with the last process that has it mapped, however that process ends.

    Its pages are allocated once, when it is made, because that costs several times as much as
    copying into them. That is why a rank keeps its segment from update to update.
    """

    def __init__(self, *, num_slots: int, slot_bytes: int) -> None:
        """Allocates the memory. It is freed with the object and its views.

        Raises:
            OSError: There is not enough memory.
        """
        self.num_slots = num_slots
        self.slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        self.num_bytes = _PAGE + num_slots * self.slot_bytes
        self.fd = os.memfd_create(_SEGMENT_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.posix_fallocate(self.fd, 0, self.num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(self.fd, self.num_bytes, flags=flags)

    def name_update(self, update_id: str) -> None:
        """Writes the id of the update whose bytes the slots will hold."""
        self._map[:_PAGE] = update_id.encode().ljust(_PAGE, b"\0")

    def start(self, slot: int) -> int:
        """Returns the offset of a slot, in bytes."""
        return _PAGE + slot * self.slot_bytes

    def view(self, start: int, length: int) -> memoryview:
        """Returns a writable view of `length` bytes from `start` on."""
        return memoryview(self._map)[start : start + length]


def _copy_into(target: memoryview, tensor: "Tensor", element_type: str) -> None:
    """Copies the bytes of a weight, converting them in the same pass over memory.

    Args:
        target: [number of bytes], writable, at least one.
    """
    import torch

    held = torch.frombuffer(target, dtype=getattr(torch, element_type))
    held.view(tensor.shape).copy_(tensor.detach())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
