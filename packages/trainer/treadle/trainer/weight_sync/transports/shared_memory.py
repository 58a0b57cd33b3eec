"""Shared memory transport: a rank fills slots of its segment, the servers of its host read them.

Invariant: a slot is filled again only when every server that goes on has given it back, so each
weight is copied once, from the parameter into the slot, however many servers read it there. Beyond
the weights a rank holds `NUM_SLOTS` slots, each as large as a bucket. Where an engine takes whole
tensors only, they are as large as the rank's largest weight, if that is more.

No checksum: what a server reads are the pages that were written here, in the same memory. What can
go wrong on the way (another segment, a bucket twice, out of order, or missing) shows in the
segment's first page and in the tensor, offset and length of each part.

The rank waits for free slots; a thread per server hears which are, until its stream ends, at the
latest by its deadline. A server whose stream breaks is left behind and reported, the others go on.
It may still read from this segment, so the next push has a new one.
"""

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout.v1 import weight_sync_service_pb2_grpc as pb_grpc
from treadle.trainer.policy.commands import SendReport, Share, ShareTarget
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError, explain
from treadle.trainer.weight_sync.payload import WeightSource, copy_into, num_bytes
from treadle.trainer.weight_sync.transports.chunk_queue import Feed
from treadle.trainer.weight_sync.transports.segment import Segment
from treadle.trainer.weight_sync.transports.slots import Slots

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NUM_SLOTS", "SharedMemorySender"]

NUM_SLOTS = 2
_ALIGNMENT = 64  # a cache line; also what every element type needs


class _Stream:
    """One PushBuckets call to one server, in a thread of its own."""

    def __init__(self, target: ShareTarget, command: Share, segment: Segment, slots: Slots) -> None:
        self.target = target
        self.error: WeightSyncError | None = None
        self._deadline_s = command.deadline_s
        self._security = command.security
        self._slots = slots
        # The header, and one bucket per slot at most: putting never waits.
        self._feed: Feed[pb.PushBucketsRequest] = Feed(1 + segment.num_slots)
        header = pb.BucketsHeader(
            update_id=command.update_id,
            pid=os.getpid(),
            fd=segment.fd,
            num_bytes=segment.num_bytes,
        )
        self._feed.put(pb.PushBucketsRequest(header=header))
        self._thread = threading.Thread(target=self._run, name=f"share-{target.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            security = self._security.read()
            with security.open_blocking(self.target.address) as channel:
                stub = pb_grpc.WeightSyncServiceStub(channel)  # type: ignore[no-untyped-call]
                responses = stub.PushBuckets(
                    self._feed, timeout=self._deadline_s, metadata=security.metadata
                )
                for response in responses:
                    self._slots.give_back(self.target.name, response.slot)
        except grpc.RpcError as error:
            self.error = explain(error, server=self.target.name, call="PushBuckets")
        except (OSError, ValueError) as error:  # no token to be read; a slot that it did not have
            message = f"{self.target.name}: PushBuckets: {error}"
            self.error = WeightSyncError(message, Outcome.REPLACE)
        finally:
            self._feed.close()
            self._slots.leave(self.target.name)

    def send(self, bucket: pb.Bucket) -> None:
        """Sends a bucket, unless the stream has broken."""
        self._feed.put(pb.PushBucketsRequest(bucket=bucket))

    def join(self) -> None:
        """Waits until the server has answered, or the stream has broken."""
        self._feed.finish()
        self._thread.join()


class _Filler:
    """Packs weights into slots in turn, and sends each slot when it is full.

    It is full when the next weight has no room or, where weights are split, when it holds a
    bucket. A slot may be larger, for one weight: more would only make the servers wait for it.
    """

    def __init__(
        self, segment: Segment, slots: Slots, streams: Sequence[_Stream], command: Share
    ) -> None:
        self.num_bytes = 0
        self._bucket_bytes = _rounded(command.bucket_bytes)
        self._element_type = command.element_type
        self._split = command.split_tensors
        self._segment = segment
        self._slots = slots
        self._streams = streams
        self._bucket = pb.Bucket(slot=0)
        self._used = 0

    def put(self, index: int, tensor: "Tensor", length: int) -> None:
        """Copies one weight of `length` bytes into the slot that is being filled, and the next."""
        flat = tensor.detach().reshape(-1)
        offset = 0
        while offset < length and self._slots.readers:
            num_bytes = self._room(length - offset)
            elements = slice(*(n * len(flat) // length for n in (offset, offset + num_bytes)))
            start = self._segment.start(self._bucket.slot) + self._used
            copy_into(self._segment.view(start, num_bytes), flat[elements], self._element_type)
            self._bucket.parts.add(tensor_index=index, offset=offset, length=num_bytes, start=start)
            self._used += _rounded(num_bytes)
            offset += num_bytes
        self.num_bytes += offset

    def _room(self, wanted: int) -> int:
        """Bytes of the next part, whose slot is free; at most `wanted`."""
        room = self._bucket_bytes - self._used
        if self._bucket.parts and room < (_ALIGNMENT if self._split else wanted):
            self.flush()
            room = self._bucket_bytes
        if not self._bucket.parts:
            self._slots.take(self._bucket.slot)
        return min(room, wanted) if self._split else wanted

    def finish(self) -> None:
        """Hands out what is left, and an empty bucket, which says that it was all."""
        if self._bucket.parts:
            self.flush()
        self._slots.take(self._bucket.slot)
        self.flush()

    def flush(self) -> None:
        """Hands out the slot, and goes on with the next one."""
        self._slots.hand_out(self._bucket.slot)
        for stream in self._streams:
            stream.send(self._bucket)
        self._bucket = pb.Bucket(slot=(self._bucket.slot + 1) % self._segment.num_slots)
        self._used = 0


class SharedMemorySender:
    """A rank's end of the transport; keeps its segment from update to update."""

    def __init__(self) -> None:
        self._segment: Segment | None = None

    def push(self, policy: WeightSource, command: Share, *, rank: int) -> SendReport:
        """Hands this rank's weights to every target; every rank must call it.

        The weights are exported even where this rank sends none, or no target is left, because
        the export is collective.

        Raises:
            OSError: there is not enough memory for the segment.
        """
        specs = policy.weight_specs()
        lengths = [num_bytes(spec, command.element_type) for spec in specs]
        mine = {spec.name: i for i, spec in enumerate(specs) if spec.sender == rank}
        if not mine:
            for _ in policy.export_weights():
                pass
            return SendReport(num_bytes=0, crc32={}, errors={})
        largest = max(lengths[index] for index in mine.values())
        whole = 0 if command.split_tensors else largest
        segment = self._segment_of(max(command.bucket_bytes, whole))
        segment.name_update(command.update_id)
        slots = Slots(segment.num_slots, [target.name for target in command.targets])
        streams = [_Stream(target, command, segment, slots) for target in command.targets]
        filler = _Filler(segment, slots, streams, command)
        try:
            for named in policy.export_weights():
                if (index := mine.get(named.name)) is not None:
                    filler.put(index, named.tensor, lengths[index])
            filler.finish()
        finally:
            for stream in streams:
                stream.join()
        broken = {stream.target.name: stream.error for stream in streams if stream.error}
        if broken:
            self._segment = None
        return SendReport(
            num_bytes=filler.num_bytes,
            crc32={},
            errors={name: str(error) for name, error in broken.items()},
            misfits=tuple(name for name, e in broken.items() if e.outcome is Outcome.STOP),
        )

    def _segment_of(self, slot_bytes: int) -> Segment:
        if self._segment is None or self._segment.slot_bytes < slot_bytes:
            self._segment = None  # before another is taken
            self._segment = Segment(num_slots=NUM_SLOTS, slot_bytes=slot_bytes)
        return self._segment


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
