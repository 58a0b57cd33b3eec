"""Receiving: the weights that a group broadcasts, written into the model bucket by bucket.

Invariant: a thread of its own waits for the buckets, the compute thread writes them, and the
next bucket is asked for when the one before is written. However it ends, no bucket is waited
for afterwards.

Who waits: the caller, for all of them. Cancelling it ends the group for all its members.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from treadle.rollout_server.engine import CollectiveGroup, TensorSpec
from treadle.rollout_server.engines.common.collective import CollectiveMember, Received
from treadle.rollout_server.engines.torch.compute_thread import ComputeThread
from treadle.rollout_server.engines.torch.model import CachedModel


async def receive(
    group: CollectiveGroup,
    tensors: Sequence[TensorSpec],
    *,
    member: CollectiveMember,
    model: CachedModel,
    thread: ComputeThread,
) -> None:
    """Overwrites the parameters, whose names and shapes `tensors` have.

    Raises:
        CollectiveBroken: The group ended; the weights are a mixture.
        EngineFailed: The compute thread is broken.
    """
    buckets = member.receive_buckets(group, tensors)
    waiting: asyncio.Future[list[Received] | None] | None = None
    try:
        while True:
            waiting = asyncio.ensure_future(asyncio.to_thread(next, buckets, None))
            bucket = await asyncio.shield(waiting)
            if bucket is None:
                return
            await thread.call(partial(_write, model, bucket))
    except asyncio.CancelledError:
        member.abort("its server gave the update up")
        if waiting is not None and not waiting.done():
            await asyncio.wait({waiting})
            waiting.exception()  # Seen: it is what was asked for.
        raise
    finally:
        await asyncio.to_thread(buckets.close)


def _write(model: CachedModel, bucket: Sequence[Received]) -> None:
    for spec, tensor in bucket:
        model.overwrite(spec.name, tensor)
