"""Publishing by shared memory: Begin on all servers; the ranks hand them buckets; Commit.

Invariant: a push that broke is not resumed, because its server may have read a slot while it was
filled again: the server is begun anew, under another update, and gets everything. The others go on
to their Commit meanwhile.
"""

import logging
import uuid
from collections.abc import Mapping
from typing import cast

from treadle.trainer.config.schema import SharedMemoryTransportConfig
from treadle.trainer.policy.commands import SendReport, Share, ShareTarget
from treadle.trainer.weight_sync.client import WeightSyncClient
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError
from treadle.trainer.weight_sync.update_round import Round

__all__ = ["publish_shared_memory"]

_log = logging.getLogger(__name__)


async def publish_shared_memory(round_: Round, transport: SharedMemoryTransportConfig) -> None:
    """Leaves in `round_.live` the servers that sample from the version.

    Raises:
        WeightSyncError: trainer and servers do not fit, as where they are on different hosts.
        PolicyError: a policy rank failed.
    """
    waiting = dict(round_.live)
    done: dict[str, WeightSyncClient] = {}
    for attempt in range(round_.config.max_push_attempts):
        round_.update_id = uuid.uuid4().hex
        round_.live = waiting
        last = attempt + 1 == round_.config.max_push_attempts
        waiting = await _share(round_, transport.bucket_bytes, last=last)
        await round_.commit()
        done |= round_.live
        if not waiting:
            break
    round_.live = done


async def _share(round_: Round, bucket_bytes: int, *, last: bool) -> dict[str, WeightSyncClient]:
    """Begins and hands over; the servers that have to be begun again."""
    request = round_.announcement()
    request.shared_memory.SetInParent()
    begun = await round_.begin(request)
    command = Share(
        update_id=round_.update_id,
        element_type=round_.element_type,
        targets=tuple(
            ShareTarget(name=name, address=server.address) for name, server in round_.live.items()
        ),
        bucket_bytes=bucket_bytes,
        deadline_s=round_.send_deadline_s,
        # Parts are only new where the engine is to take them.
        split_tensors=not request.HasField("in_place")
        or all(answer.split_tensors for answer in begun.values()),
        security=round_.security,
    )
    async with round_.renewing():
        reports = cast("list[SendReport]", await round_.policy.call(command))
    return await _take_out(round_, reports, last=last)


async def _take_out(
    round_: Round, reports: list[SendReport], *, last: bool
) -> dict[str, WeightSyncClient]:
    """Takes the servers whose push broke out of the round; those that may try again."""
    misfits = {name for report in reports for name in report.misfits}
    errors: Mapping[str, str] = {n: e for report in reports for n, e in report.errors.items()}
    again = [name for name in errors if not last and name not in misfits]
    outcomes = {
        name: Outcome.STOP if name in misfits else Outcome.REPLACE
        for name in errors
        if name not in again
    }
    await round_.drop({n: WeightSyncError(errors[n], outcome) for n, outcome in outcomes.items()})
    for name in again:
        _log.warning("version %d: sharing again: %s", round_.version, errors[name])
    return await round_.set_aside(again)
