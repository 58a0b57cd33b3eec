"""Deltas against the base that they are applied to, and against what does not fit it."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.errors import DeltaBaseMismatch
from treadle.rollout_server.updates.delta import DeltaBase, DeltaEncoding, as_base, encoded_elements
from treadle.rollout_server.updates.staging import Assembler

SPECS = (
    TensorSpec(name="a", element_type=ElementType.BFLOAT16, shape=(4, 3)),
    TensorSpec(name="b", element_type=ElementType.FLOAT32, shape=(5,)),
    TensorSpec(name="c", element_type=ElementType.FLOAT8_E4M3FN, shape=(7,)),
    TensorSpec(name="d", element_type=ElementType.FLOAT32, shape=(0,)),
)
weight_sets = st.tuples(*(st.binary(min_size=s.size_bytes, max_size=s.size_bytes) for s in SPECS))


def staged(data: tuple[bytes, ...], *, sizes: tuple[int, ...] | None = None) -> Assembler:
    assembler = Assembler(SPECS, max_chunk_bytes=1 << 20, sizes=sizes)
    for index, part in enumerate(data):
        if part:
            assembler.accept(index, 0, zlib.crc32(part), part)
    assert assembler.complete
    return assembler


def encode(spec: TensorSpec, old: bytes, new: bytes) -> bytes:
    """By hand, from the format's description."""
    size = spec.element_type.size_bytes
    places = [
        n for n in range(len(old) // size) if old[n * size :][:size] != new[n * size :][:size]
    ]
    if not places:
        return b""
    values = b"".join(new[n * size :][:size] for n in places)
    positions = b"".join(n.to_bytes(4, "little") for n in places)
    return len(places).to_bytes(8, "little") + positions + values


def changes(old: tuple[bytes, ...], new: tuple[bytes, ...]) -> tuple[DeltaEncoding, Assembler]:
    encoded = tuple(encode(s, a, b) for s, a, b in zip(SPECS, old, new, strict=True))
    sizes = tuple(map(len, encoded))
    for spec, size in zip(SPECS, sizes, strict=True):
        assert encoded_elements(spec, size) is not None
    delta = DeltaEncoding(base_version=1, encoded_bytes=sizes, crc32=tuple(map(zlib.crc32, new)))
    return delta, staged(encoded, sizes=sizes)


def held(base: DeltaBase) -> tuple[bytes, ...]:
    return tuple(bytes(tensor.data) for tensor in base.weights.named_tensors())


@given(weight_sets, weight_sets)
def test_a_delta_leads_to_the_new_weights_and_back(
    old: tuple[bytes, ...], new: tuple[bytes, ...]
) -> None:
    base = DeltaBase(1, staged(old))
    delta, encoded = changes(old, new)
    base.apply(delta, encoded)
    assert held(base) == new
    base.undo(encoded)
    assert held(base) == old


@given(weight_sets, weight_sets, st.integers(0, 2))
def test_a_delta_of_another_base_changes_nothing(
    old: tuple[bytes, ...], new: tuple[bytes, ...], which: int
) -> None:
    other = tuple(bytes(b ^ (n == which) for b in part) for n, part in enumerate(old))
    base = DeltaBase(1, staged(other))
    delta, encoded = changes(old, new)
    if all(zlib.crc32(b) == c for b, c in zip(_applied(other, old, new), delta.crc32, strict=True)):
        return  # Every element changed, so that the base does not matter.
    with pytest.raises(DeltaBaseMismatch, match=r"CRC-32 .* announced"):
        base.apply(delta, encoded)
    assert held(base) == other


def _applied(
    base: tuple[bytes, ...], old: tuple[bytes, ...], new: tuple[bytes, ...]
) -> list[bytes]:
    parts = []
    for spec, b, o, n in zip(SPECS, base, old, new, strict=True):
        kind = np.dtype(f"u{spec.element_type.size_bytes}")
        before, after = np.frombuffer(o, kind), np.frombuffer(n, kind)
        parts.append(np.where(before != after, after, np.frombuffer(b, kind)).tobytes())
    return parts


@pytest.mark.parametrize(
    ("encoded", "problem"),
    [
        ((3).to_bytes(8, "little") + bytes(4 + 2), "does not count the 1 changes"),
        ((1).to_bytes(8, "little") + (12).to_bytes(4, "little") + bytes(2), "lie outside"),
        ((2).to_bytes(8, "little") + bytes(8 + 4), "not in ascending order"),
    ],
)
def test_a_malformed_delta_changes_nothing(encoded: bytes, problem: str) -> None:
    whole = tuple(bytes(spec.size_bytes) for spec in SPECS)
    base = DeltaBase(1, staged(whole))
    sizes = (len(encoded), 0, 0, 0)
    delta = DeltaEncoding(base_version=1, encoded_bytes=sizes, crc32=tuple(map(zlib.crc32, whole)))
    with pytest.raises(DeltaBaseMismatch, match=problem):
        base.apply(delta, staged((encoded, b"", b"", b""), sizes=sizes))
    assert held(base) == whole


def test_a_base_that_is_not_held_is_told_with_the_one_that_is() -> None:
    delta = DeltaEncoding(base_version=3, encoded_bytes=(0,) * 4, crc32=(0,) * 4)
    with pytest.raises(DeltaBaseMismatch, match="holds no base, not 3") as none:
        as_base(SPECS, None, delta)
    whole = staged(tuple(bytes(spec.size_bytes) for spec in SPECS))
    with pytest.raises(DeltaBaseMismatch, match="holds version 2 as a base, not 3") as other:
        as_base(SPECS, DeltaBase(2, whole), delta)
    with pytest.raises(DeltaBaseMismatch, match="other tensors"):
        as_base(SPECS[::-1], DeltaBase(3, whole), delta)
    assert (none.value.held, other.value.held) == (0, 2)


def test_only_whole_changes_fit() -> None:
    spec = SPECS[0]
    fits = {
        size: encoded_elements(spec, size) for size in (0, 7, 8, 13, 14, 8 + 6 * 12, 8 + 6 * 13)
    }
    assert fits == {0: 0, 7: None, 8: None, 13: None, 14: 1, 80: 12, 86: None}
