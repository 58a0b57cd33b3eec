"""PushBuckets: the bytes of a sender's segment, bucket by bucket.

Invariant: a slot is given back only when nobody here reads it any more: staged, when its bytes
are copied; in place, when the engine has written them. A stream that ends without its last
bucket, which is empty, ends the update, because the sender may then fill slots that are still
being read; so nothing that was read then is ever committed. (To gRPC a connection that is gone
looks as if the sender had finished, so that its end alone says nothing.)

Who waits: this stream, for one bucket at a time, while the sender fills the next slot; the sender,
for slots. A copy of some size runs in a thread.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.errors import InvalidField
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services.codec import decode_update_id
from treadle.rollout_server.updates.buckets import BucketPart, Segment
from treadle.rollout_server.updates.weight_update import UpdateState, WeightUpdate

_SHORT_BYTES = 256 << 10  # copied sooner than a thread is woken


async def push_buckets(
    replica: Replica, requests: AsyncIterator[pb.PushBucketsRequest]
) -> AsyncGenerator[pb.PushBucketsResponse, None]:
    """Serves one stream.

    Raises:
        SegmentUnreadable: The segment is not to be had here.
        RolloutServerError: The update ended, or a part has no place in it.
    """
    header = await anext(requests, None)
    if header is None or not header.HasField("header"):
        raise InvalidField("payload", "no header", "a header as the first message")
    update = replica.current_update.find(decode_update_id(header.header.update_id))
    try:
        update.check_pushed()
        segment = Segment(
            pid=header.header.pid,
            fd=header.header.fd,
            num_bytes=header.header.num_bytes,
            update_id=update.update_id,
        )
        while True:
            request = await anext(requests, None)
            if request is None or not request.HasField("bucket"):
                raise InvalidField("payload", "no bucket", "buckets up to an empty one")
            parts = [_decode(part) for part in request.bucket.parts]
            for part in parts:
                segment.check(part)
            with update.working(replica.clock):
                if update.tensor_queue is None:
                    await _copy(update, segment, parts)
                else:
                    await _lend(update, segment, parts, now=replica.clock.time())
            yield pb.PushBucketsResponse(slot=request.bucket.slot)
            if not parts:
                return
    except BaseException:
        if update.state in (UpdateState.OPEN, UpdateState.COMPLETE):
            replica.current_update.abort(update.update_id)
        raise


def _decode(part: pb.BucketPart) -> BucketPart:
    return BucketPart(
        tensor_index=part.tensor_index, offset=part.offset, length=part.length, start=part.start
    )


async def _copy(update: WeightUpdate, segment: Segment, parts: list[BucketPart]) -> None:
    for part in parts:
        assembler = update.assembler
        assembler.check(part.tensor_index, part.offset, part.length)
        write = partial(assembler.write, part.tensor_index, part.offset, segment.view(part))
        if part.length <= _SHORT_BYTES:
            write()
        else:
            await asyncio.to_thread(write)
            # Another stream may have brought the same bytes meanwhile; they count once.
            assembler.check(part.tensor_index, part.offset, part.length)
        assembler.advance(part.tensor_index, part.length)


async def _lend(
    update: WeightUpdate, segment: Segment, parts: list[BucketPart], *, now: float
) -> None:
    assert update.tensor_queue is not None
    for part in parts:
        view, place = segment.view(part), segment.place(part)
        # What is held until then keeps the segment, and so the descriptor behind the place, open.
        update.lend(part.tensor_index, part.offset, view, place, done=segment.let_go, now=now)
    await update.tensor_queue.caught_up()
