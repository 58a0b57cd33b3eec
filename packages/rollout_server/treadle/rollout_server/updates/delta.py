"""The delta: changed elements, and the base to which they apply.

Invariant: outside `apply` and `undo` the base is the weights of `version`, bit for bit. Applying a
change swaps values, so the encoded bytes hold the old ones afterwards: a delta that turns out not
to fit half-way is undone by the same swaps, and no second copy of the weights is held. What an
engine gets has the CRC-32 that the trainer announced, whatever the base was.

The base is the staging area of the update that brought it: one copy of the weights in host
memory, for as long as the next updates are deltas.

Encoded, a tensor is: n (uint64), n positions (uint32, ascending), n values, little-endian; no
bytes if nothing changed. Blocking; run it in a thread. Outside the engines, only this module
imports numpy.
"""

import importlib.util
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treadle.rollout_server.engine import TensorSpec
from treadle.rollout_server.errors import DeltaBaseMismatch
from treadle.rollout_server.updates.staging import Assembler

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COUNT_BYTES = 8
_POSITION_BYTES = 4
_SLICE = 1 << 18  # Elements swapped at once: numpy holds the GIL meanwhile.


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEncoding:
    """How an update is encoded.

    Attributes:
        encoded_bytes: Number of encoded bytes per tensor.
        crc32: Per tensor, after the change.
    """

    base_version: int
    encoded_bytes: tuple[int, ...]
    crc32: tuple[int, ...]


def available() -> bool:
    """Returns whether this process can decode a delta."""
    return importlib.util.find_spec("numpy") is not None


def encoded_elements(spec: TensorSpec, encoded_bytes: int) -> int | None:
    """Returns the number of elements that the bytes change; None if no delta has that size."""
    if encoded_bytes == 0:
        return 0
    each = _POSITION_BYTES + spec.element_type.size_bytes
    count, rest = divmod(encoded_bytes - _COUNT_BYTES, each)
    return (
        count if not rest and 0 < count * spec.element_type.size_bytes <= spec.size_bytes else None
    )


class DeltaBase:
    """Weights to which the next update may apply as a delta."""

    def __init__(self, version: int, weights: Assembler) -> None:
        self.version = version
        self.weights = weights

    def apply(self, delta: DeltaEncoding, encoded: Assembler) -> None:
        """Applies a delta to the base; `undo` takes it back.

        Raises:
            DeltaBaseMismatch: The result is not what was announced. The base is unchanged.
        """
        for index, crc32 in enumerate(delta.crc32):
            problem = self._change(index, encoded) or self._difference(index, crc32)
            if problem is not None:
                for done in range(index + 1):
                    self._swap(done, encoded)
                name = self.weights.tensors[index].name
                raise DeltaBaseMismatch(0, delta.base_version, f"tensor {name!r}: {problem}")

    def undo(self, encoded: Assembler) -> None:
        """Reverts `apply` with the same bytes."""
        for index in range(len(self.weights.tensors)):
            self._swap(index, encoded)

    def _change(self, index: int, encoded: Assembler) -> str | None:
        """Swaps a tensor's values in; returns the problem if they do not fit."""
        data = encoded.view(index)
        if not data:
            return None
        spec = self.weights.tensors[index]
        count = encoded_elements(spec, len(data))
        if int.from_bytes(data[:_COUNT_BYTES], "little") != count:
            self._blank(data)
            return f"its delta does not count the {count} changes that it has"
        positions, _, elements = self._arrays(index, encoded)
        if (positions[1:] <= positions[:-1]).any() or positions[-1] >= len(elements):
            self._blank(data)
            return "its changes are not in ascending order or lie outside"
        self._swap(index, encoded)
        return None

    @staticmethod
    def _blank(data: memoryview) -> None:
        """Makes a delta that cannot be applied change nothing when it is undone."""
        data[:_COUNT_BYTES] = bytes(_COUNT_BYTES)

    def _difference(self, index: int, crc32: int) -> str | None:
        computed = zlib.crc32(self.weights.view(index))
        if computed == crc32:
            return None
        return f"it has CRC-32 {computed:#010x} after the delta, announced {crc32:#010x}"

    def _swap(self, index: int, encoded: Assembler) -> None:
        positions, values, elements = self._arrays(index, encoded)
        for start in range(0, len(positions), _SLICE):
            places = positions[start : start + _SLICE]
            old = elements[places]
            elements[places] = values[start : start + _SLICE]
            values[start : start + _SLICE] = old

    def _arrays(
        self, index: int, encoded: Assembler
    ) -> "tuple[NDArray[Any], NDArray[Any], NDArray[Any]]":
        """Returns positions ``[n]``, their values ``[n]``, and all elements ``[N]``."""
        import numpy as np

        data = encoded.view(index)
        size = self.weights.tensors[index].element_type.size_bytes
        element = np.dtype(f"<u{size}")
        count = int.from_bytes(data[:_COUNT_BYTES], "little")
        after = _COUNT_BYTES + count * _POSITION_BYTES
        positions = np.frombuffer(data[_COUNT_BYTES:after] or b"", dtype="<u4")
        values = np.frombuffer(data[after:] if count else b"", dtype=element)
        return positions, values, np.frombuffer(self.weights.view(index) or b"", dtype=element)


def as_base(kept: Sequence[TensorSpec], base: DeltaBase | None, delta: DeltaEncoding) -> DeltaBase:
    """Returns the base of a delta for these tensors.

    Raises:
        DeltaBaseMismatch: The server does not hold it.
    """
    held = 0 if base is None else base.version
    if base is None or held != delta.base_version:
        cause = f"the server holds version {held} as a base" if held else "the server holds no base"
        raise DeltaBaseMismatch(held, delta.base_version, f"{cause}, not {delta.base_version}")
    if base.weights.tensors != tuple(kept):
        raise DeltaBaseMismatch(
            held, delta.base_version, f"base {held} has other tensors, or in another order"
        )
    return base
