"""Delta encoding, the rank's side: what changed in its weights since the version it kept.

Invariant: `_kept` holds this rank's weights of `_version`, as the bytes that servers were sent or
could have made of what they were sent; changes are found by comparing bits, so a server that
holds that version and applies them holds today's weights bit for bit, not-a-numbers and signed
zeros too.

Costs a second copy of the rank's share in host memory, and the changes until the next `compare`.
A weight's encoding is `BeginUpdateRequest.delta`'s: n (uint64), n positions (uint32), n values.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from treadle.trainer.policy.commands import Compare, DeltaReport, Push, SendReport, WriteFiles
from treadle.trainer.policy.types import ElementType
from treadle.trainer.weight_sync.payload import WeightSource, tensor_bytes
from treadle.trainer.weight_sync.transports.file import FileEntry, write_file
from treadle.trainer.weight_sync.transports.inline import push_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DeltaSender", "encode"]

_ELEMENTS: Mapping[ElementType, str] = {"float32": "<u4", "bfloat16": "<u2"}
_MAX_ELEMENTS = 1 << 32  # positions are uint32


def encode(old: memoryview, new: memoryview, element_type: ElementType) -> bytes | None:
    """The changes from `old` to `new`; no bytes where there are none.

    Args:
        old: [number of bytes].
        new: As long as `old`.
        element_type: Of both.

    Returns:
        None when the weight has too many elements for positions of 32 bits.
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


def _elements(data: memoryview, element_type: ElementType) -> "NDArray[Any]":
    import numpy as np

    return np.frombuffer(data, dtype=_ELEMENTS[element_type])


class DeltaSender:
    """One rank's share."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._kept: dict[str, NDArray[Any]] = {}
        self._encoded: dict[str, bytes] = {}

    def compare(self, policy: WeightSource, command: Compare, *, rank: int) -> DeltaReport:
        """Keeps the weights as `command.version`; every rank must call it."""
        known = self._version is not None and self._version == command.base_version
        mine = {spec.name for spec in policy.weight_specs() if spec.sender == rank}
        self._version = None  # until all of it is kept
        self._encoded = {}
        fits, crc32 = known, dict[str, int]()
        for named in policy.export_weights():
            if named.name not in mine:
                continue
            data = tensor_bytes(named.tensor, command.element_type)
            if known:
                encoded = encode(self._kept[named.name].data, data, command.element_type)
                fits = fits and encoded is not None
                self._encoded[named.name] = encoded or b""
                crc32[named.name] = zlib.crc32(data)
            self._keep(named.name, data)
        self._version = command.version
        sizes = {name: len(encoded) for name, encoded in self._encoded.items()}
        return DeltaReport(fits=fits, encoded_bytes=sizes, crc32=crc32)

    def push(self, policy: WeightSource, command: Push, *, rank: int) -> SendReport:
        """Sends the changes that `compare` found; no rank waits for another."""
        return push_bytes(self._changes(policy, rank), command)

    def write(self, policy: WeightSource, command: WriteFiles, *, rank: int) -> SendReport:
        """Writes the changes that `compare` found; no rank waits for another.

        Raises:
            OSError: see `write_file`.
        """
        specs = policy.weight_specs()
        encoded = {s.name: self._encoded[s.name] for s in specs if s.sender == rank}
        entries = [
            FileEntry(name=name, dtype="U8", shape=(len(data),), num_bytes=len(data))
            for name, data in encoded.items()
        ]
        parts = ((name, memoryview(data)) for name, data in encoded.items())
        return write_file(command, entries, parts, rank=rank)

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
