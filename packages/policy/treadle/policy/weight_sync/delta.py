"""Deltas: only what changed goes to the servers that hold an earlier version.

Data flow: the driver has each rank compare its weights with those of the version that it kept
(`ComputeDelta`), and then sends the changes by the inline or the file transport. Servers that do
not hold that version get the whole weights. A server applies the changes at its commit and checks
each weight's CRC-32.

Who waits for whom: the driver waits for all ranks. Servers that hold their changes wait for those
that get the whole weights; all commit after that.

Invariants. Driver: changes go only to servers that committed the base version with `keep_base`. A
server that no longer holds it answers DELTA_BASE_MISMATCH and gets everything in the
same round, as does a server that could not read the files of changes. Nobody commits before every
server holds every byte of what it is sent, with two exceptions: a server whose base was damaged,
which it can notice only at its commit, and a server that could not read the files of the weights.
Every `full_every` versions all servers get everything, so that no fault outlives them.

Rank: `_kept` holds its weights of `_version`, as the bytes that servers were sent or could have
made from what they were sent. Changes are found by comparing bits, so a server that holds that
version and applies them holds the present weights bit for bit, NaNs and signed zeros included.

A rank needs host memory for a second copy of its share, and for the changes until the next
`compute`. A weight is encoded as in `BeginUpdateRequest.delta`: n (uint64), n positions (uint32),
n values.
"""

import uuid
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.payload import WeightSource, own_weights, tensor_bytes
from treadle.policy.weight_sync.transports.file import FileEntry, write_file
from treadle.policy.weight_sync.transports.inline import push_bytes
from treadle.policy.weight_sync.update_round import Delta, UpdateRound

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DeltaPublisher", "DeltaSender", "encode"]

_ELEMENTS: Mapping[str, str] = {"float32": "<u4", "bfloat16": "<u2"}
_MAX_ELEMENTS = 1 << 32  # positions are uint32
_Step: TypeAlias = Callable[[UpdateRound], Awaitable[None]]


# --- the driver's side ---------------------------------------------------------------------------


class DeltaPublisher:
    """The driver's end. Remembers which server holds what."""

    def __init__(self) -> None:
        self._version: int | None = None  # that the ranks keep
        self._holders: set[str] = set()  # names of the servers that hold it too
        self._since_full = 0  # versions since one went whole to all servers

    async def publish(self, update_round: UpdateRound, send: _Step, publish: _Step) -> None:
        """Leaves in `update_round.live` the servers that sample from the version.

        Args:
            send: The transport's; leaves in a round the servers that hold every byte.
            publish: The transport's; leaves in a round the servers that sample from the version.
        """
        # A version that was published before goes whole to a server that came late.
        new = update_round.version != self._version
        delta = await self._compute(update_round) if new else None
        holders = self._holders
        if new:
            self._since_full += 1
            if self._since_full > update_round.config.delta.full_every:
                delta = None
            if delta is None:
                self._since_full = 0
            self._holders = set()
        known = [] if delta is None else [name for name in update_round.live if name in holders]
        by_delta = _part(update_round, known, delta=delta)
        whole = _part(update_round, [n for n in update_round.live if n not in by_delta.live])
        await self._publish_parts(by_delta, whole, send, publish)
        update_round.live = by_delta.live | whole.live
        sent_bytes = sum(sum(part.sizes) * len(part.live) for part in (by_delta, whole))
        update_round.sent_bytes = sent_bytes / max(1, len(update_round.live))
        self._holders |= set(update_round.live)

    @staticmethod
    async def _publish_parts(
        by_delta: UpdateRound, whole: UpdateRound, send: _Step, publish: _Step
    ) -> None:
        if by_delta.live:
            await send(by_delta)
            _move_retries(by_delta, whole)
        if whole.live:
            async with by_delta.renewing_leases():  # they wait while the others get much more
                await send(whole)
        async with whole.renewing_leases():  # a commit may wait long for completions to end
            await by_delta.commit()
        await whole.commit()
        late = _part(whole, [])
        _move_retries(by_delta, late)
        _move_retries(whole, late)
        if late.live:
            await publish(late)
            whole.live |= late.live

    async def _compute(self, update_round: UpdateRound) -> Delta | None:
        """Has the ranks keep the weights; returns the changes if they can be sent and are less."""
        base, self._version = self._version, None
        request = weights_pb.ComputeDeltaRequest(
            version=update_round.version, base_version=base, element_type=update_round.element_type
        )
        reports: list[weights_pb.ComputeDeltaResponse]
        reports = await update_round.policy.call(request)
        self._version = update_round.version
        if base is None or not all(report.fits for report in reports):
            return None
        sizes = {name: size for report in reports for name, size in report.encoded_bytes.items()}
        if sum(sizes.values()) >= update_round.num_bytes:
            return None
        crc32 = {name: crc for report in reports for name, crc in report.crc32.items()}
        return Delta(
            base_version=base,
            encoded_bytes=tuple(sizes[spec.name] for spec in update_round.specs),
            crc32=tuple(crc32[spec.name] for spec in update_round.specs),
        )


def _part(
    update_round: UpdateRound, names: Sequence[str], *, delta: Delta | None = None
) -> UpdateRound:
    """Returns a round for some of the servers, with its own update. `failed` is shared."""
    return replace(
        update_round,
        live={name: update_round.live[name] for name in names},
        update_id=uuid.uuid4().hex,
        keep_base=True,
        delta=delta,
        to_retry={},
    )


def _move_retries(source: UpdateRound, target: UpdateRound) -> None:
    target.live |= source.to_retry
    source.to_retry.clear()


# --- the rank's side -----------------------------------------------------------------------------


def encode(old: memoryview, new: memoryview, element_type: str) -> bytes | None:
    """Returns the changes from `old` to `new`; empty if there are none.

    Args:
        new: [number of bytes], as long as `old`.

    Returns:
        None if the weight has too many elements for positions of 32 bits.
    """
    import numpy as np

    before, after = _elements(old, element_type), _elements(new, element_type)
    if len(after) > _MAX_ELEMENTS:
        return None
    positions = np.flatnonzero(before != after).astype("<u4")
    if not len(positions):
        return b""
    count = len(positions).to_bytes(8, "little")
    return b"".join((count, positions.tobytes(), after[positions].tobytes()))


def _elements(data: memoryview, element_type: str) -> "NDArray[Any]":
    import numpy as np

    return np.frombuffer(data, dtype=_ELEMENTS[element_type])


class DeltaSender:
    """A rank's end: its share of the kept weights and of the changes."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._kept: dict[str, NDArray[Any]] = {}
        self._encoded: dict[str, bytes] = {}

    def compute(
        self, policy: WeightSource, request: weights_pb.ComputeDeltaRequest, *, rank: int
    ) -> weights_pb.ComputeDeltaResponse:
        """Keeps the weights as `request.version` and finds what changed since the base.

        Every rank must call it.
        """
        known = request.HasField("base_version") and self._version == request.base_version
        self._version = None  # until all weights are kept
        self._encoded = {}
        fits, crc32 = known, dict[str, int]()
        for _, named in own_weights(policy, policy.weight_specs(), rank):
            data = tensor_bytes(named.tensor, request.element_type)
            if known:
                encoded = encode(self._kept[named.name].data, data, request.element_type)
                fits = fits and encoded is not None
                self._encoded[named.name] = encoded or b""
                crc32[named.name] = zlib.crc32(data)
            self._keep(named.name, data)
        self._version = request.version
        sizes = {name: len(encoded) for name, encoded in self._encoded.items()}
        return weights_pb.ComputeDeltaResponse(fits=fits, encoded_bytes=sizes, crc32=crc32)

    def push(
        self, policy: WeightSource, request: weights_pb.PushRequest, *, rank: int
    ) -> weights_pb.PushResponse:
        """Sends the changes that `compute` found. No rank waits for another."""
        return push_bytes(self._changes(policy, rank), request)

    def write(
        self, policy: WeightSource, request: weights_pb.WriteFilesRequest, *, rank: int
    ) -> weights_pb.WriteFilesResponse:
        """Writes the changes that `compute` found. No rank waits for another.

        Raises:
            OSError: See `write_file`.
        """
        specs = policy.weight_specs()
        encoded = {s.name: self._encoded[s.name] for s in specs if s.sender == rank}
        entries = [
            FileEntry(name=name, dtype="U8", shape=(len(data),), num_bytes=len(data))
            for name, data in encoded.items()
        ]
        parts = ((name, memoryview(data)) for name, data in encoded.items())
        return write_file(request, entries, parts, rank=rank)

    def _changes(self, policy: WeightSource, rank: int) -> Iterator[tuple[int, memoryview]]:
        for index, spec in enumerate(policy.weight_specs()):
            if spec.sender == rank and (encoded := self._encoded[spec.name]):
                yield index, memoryview(encoded)

    def _keep(self, name: str, data: memoryview) -> None:
        import numpy as np

        new = np.frombuffer(data, dtype=np.uint8)
        if name in self._kept:
            np.copyto(self._kept[name], new)
        else:
            self._kept[name] = new.copy()
