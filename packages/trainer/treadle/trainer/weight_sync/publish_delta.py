"""Publishing by delta: what changed to the servers that hold the version before, all to the rest.

Invariant: a server is sent changes only of a version that it committed and was asked to keep; one
that turns out not to hold it says so (DELTA_BASE_MISMATCH) and gets everything, in the same round,
as does one that could not read the changes' files. Nobody commits before every server holds every
byte of what it is sent; the exceptions are a server whose base was not what it should have been,
which it can tell only at its commit, and one that could not read the files of the weights.

Every `full_every` versions all servers get everything, so that no fault outlives them.
"""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

from treadle.trainer.policy.commands import Compare, DeltaReport
from treadle.trainer.weight_sync.update_round import Changes, Round

__all__ = ["DeltaPublisher"]

_Step: TypeAlias = Callable[[Round], Awaitable[None]]


@dataclass(slots=True)
class DeltaPublisher:
    """Remembers which server holds what."""

    _version: int | None = None
    """That the ranks keep."""
    _holders: set[str] = field(default_factory=set)
    """Names of the servers that hold it too."""
    _since_full: int = 0

    async def publish(self, round_: Round, send: _Step, publish: _Step) -> None:
        """Leaves in `round_.live` the servers that sample from the version.

        Args:
            round_: Under way.
            send: The transport's; leaves in a round those that hold every byte.
            publish: Likewise; those that sample from the version.

        Raises:
            WeightSyncError: trainer and servers do not fit.
            PolicyError: a policy rank failed.
        """
        # A version that was published before goes to a server that came late: all of it.
        new = round_.version != self._version
        changes = await self._compare(round_) if new else None
        holders = self._holders
        if new:
            self._since_full += 1
            if self._since_full > round_.config.delta.full_every:
                changes = None
            if changes is None:
                self._since_full = 0
            self._holders = set()
        known = [] if changes is None else [name for name in round_.live if name in holders]
        by_delta = _part(round_, known, changes=changes)
        whole = _part(round_, [name for name in round_.live if name not in by_delta.live])
        await self._publish_parts(by_delta, whole, send, publish)
        round_.live = by_delta.live | whole.live
        sent_bytes = sum(sum(part.sizes) * len(part.live) for part in (by_delta, whole))
        round_.sent_bytes = sent_bytes / max(1, len(round_.live))
        self._holders |= set(round_.live)

    @staticmethod
    async def _publish_parts(by_delta: Round, whole: Round, send: _Step, publish: _Step) -> None:
        if by_delta.live:
            await send(by_delta)
            _move_refused(by_delta, whole)
        if whole.live:
            async with by_delta.renewing():  # they wait for the others, which get much more
                await send(whole)
        async with whole.renewing():  # a commit may wait long for completions to end
            await by_delta.commit()
        await whole.commit()
        late = _part(whole, [])
        _move_refused(by_delta, late)
        _move_refused(whole, late)
        if late.live:
            await publish(late)
            whole.live |= late.live

    async def _compare(self, round_: Round) -> Changes | None:
        """Has the ranks keep the weights; what changed, if that can be sent and is less."""
        base, self._version = self._version, None
        command = Compare(
            version=round_.version, base_version=base, element_type=round_.element_type
        )
        reports = cast("list[DeltaReport]", await round_.policy.call(command))
        self._version = round_.version
        if base is None or not all(report.fits for report in reports):
            return None
        sizes = {name: size for report in reports for name, size in report.encoded_bytes.items()}
        if sum(sizes.values()) >= round_.num_bytes:
            return None
        crc32 = {name: crc for report in reports for name, crc in report.crc32.items()}
        return Changes(
            base_version=base,
            encoded_bytes=tuple(sizes[spec.name] for spec in round_.specs),
            crc32=tuple(crc32[spec.name] for spec in round_.specs),
        )


def _part(round_: Round, names: Sequence[str], *, changes: Changes | None = None) -> Round:
    """A round of its own for some of the servers; who fails is named in both."""
    return replace(
        round_,
        live={name: round_.live[name] for name in names},
        update_id=uuid.uuid4().hex,
        keep_base=True,
        changes=changes,
        refused={},
    )


def _move_refused(from_: Round, to: Round) -> None:
    to.live |= from_.refused
    from_.refused.clear()
