"""Publishing inline: Begin on all servers; the ranks push to all that lack bytes; Begin again.

Invariant: Begin is idempotent and says how far each server got, so a push that broke is resumed
where it broke, until nothing lacks or the attempts are used up; then Commit on all that hold
everything.
"""

import logging
from collections.abc import Mapping
from typing import cast

from treadle.trainer.config.schema import InlineTransportConfig
from treadle.trainer.policy.commands import Push, PushTarget, SendReport
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError
from treadle.trainer.weight_sync.update_round import Round

__all__ = ["publish_inline", "push_all"]

_log = logging.getLogger(__name__)


async def publish_inline(round_: Round, transport: InlineTransportConfig) -> None:
    """Leaves in `round_.live` the servers that sample from the version.

    Raises:
        WeightSyncError: trainer and servers do not fit.
        PolicyError: a policy rank failed.
    """
    await push_all(round_, transport)
    await round_.commit()


async def push_all(round_: Round, transport: InlineTransportConfig) -> None:
    """Leaves in `round_.live` the servers that hold every byte."""
    chunk_bytes = transport.chunk_bytes
    attempts = round_.config.max_push_attempts
    wanted = round_.sizes
    request = round_.announcement()
    request.inline.SetInParent()
    errors: dict[str, str] = {}
    for attempt in range(attempts + 1):
        begun = await round_.begin(request)
        lacking = {
            name: tuple(response.received_bytes)
            for name, response in begun.items()
            if tuple(response.received_bytes) != wanted
        }
        if not lacking:
            return
        if attempt == attempts:
            missing = "{}: bytes are missing after every push"
            causes = {name: errors.get(name, missing.format(name)) for name in lacking}
            await round_.drop(
                {name: WeightSyncError(c, Outcome.REPLACE) for name, c in causes.items()}
            )
            return
        for cause in errors.values():
            _log.warning("version %d: pushing again: %s", round_.version, cause)
        smallest = min(begun[name].max_chunk_bytes or chunk_bytes for name in lacking)
        errors = await _push(round_, lacking, min(chunk_bytes, smallest))


async def _push(
    round_: Round, lacking: Mapping[str, tuple[int, ...]], chunk_bytes: int
) -> dict[str, str]:
    """Target name -> why its push broke."""
    command = Push(
        update_id=round_.update_id,
        element_type=round_.element_type,
        targets=tuple(
            PushTarget(name=name, address=round_.live[name].address, received_bytes=received)
            for name, received in lacking.items()
        ),
        chunk_bytes=chunk_bytes,
        deadline_s=round_.send_deadline_s,
        changes=round_.changes is not None,
        security=round_.security,
    )
    async with round_.renewing():
        reports = cast("list[SendReport]", await round_.policy.call(command))
    return {name: error for report in reports for name, error in report.errors.items()}
