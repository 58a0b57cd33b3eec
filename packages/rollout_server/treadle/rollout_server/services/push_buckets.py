"""PushBuckets: the bytes of a sender's segment, bucket by bucket.

Invariant: a slot is returned only when nobody here reads it any more: staged, when its bytes are
copied; in place, when the engine has written them. A stream that ends without its last bucket,
which is empty, ends the update, because the sender may then fill slots that are still being read;
so nothing that was read then is ever committed. (To gRPC a lost connection looks like a sender
that has finished, so the end of the stream proves nothing.)

Who waits: this stream, for one bucket at a time, while the sender fills the next slot; the sender,
for slots.
"""

from collections.abc import AsyncGenerator, AsyncIterator

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.errors import InvalidField
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services.codec import MAX_TENSORS, check_count, decode_update_id
from treadle.rollout_server.updates.buckets import BucketPart, MappedSegment
from treadle.rollout_server.updates.weight_update import UpdateState


async def push_buckets(
    replica: Replica, requests: AsyncIterator[pb.PushBucketsRequest]
) -> AsyncGenerator[pb.PushBucketsResponse, None]:
    """Serves one stream.

    Raises:
        SegmentUnreadable: The segment cannot be mapped here.
        RolloutServerError: The update ended, or a part does not fit it.
    """
    header = await anext(requests, None)
    if header is None or not header.HasField("header"):
        raise InvalidField("payload", "no header", "a header as the first message")
    update = replica.current_update.find(decode_update_id(header.header.update_id))
    try:
        update.incoming.check_pushed()
        segment = MappedSegment(
            pid=header.header.pid,
            fd=header.header.fd,
            num_bytes=header.header.num_bytes,
            update_id=update.update_id,
        )
        while True:
            request = await anext(requests, None)
            if request is None or not request.HasField("bucket"):
                raise InvalidField("payload", "no bucket", "buckets up to an empty one")
            check_count("bucket.parts", request.bucket.parts, at_most=MAX_TENSORS)
            parts = [_decode(part) for part in request.bucket.parts]
            for part in parts:
                segment.check(part)
            with update.working(replica.clock):
                await update.incoming.take_bucket(segment, parts)
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
