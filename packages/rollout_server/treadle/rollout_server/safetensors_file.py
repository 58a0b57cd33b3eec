"""Reads the header of a safetensors file: which tensors it holds and where their bytes lie.

Invariant: a header that parses describes byte ranges inside the file, one per tensor, whose
length matches its type and shape. The standard library is enough, so that moving weights needs
neither torch nor numpy. The format: eight bytes of
little-endian header length, a JSON object, then the data
(https://github.com/huggingface/safetensors#format).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from treadle.rollout_server.engine import ElementType, TensorSpec

_MAX_HEADER_BYTES = 100_000_000  # the format's own maximum
_ELEMENT_TYPES = {
    "F32": ElementType.FLOAT32,
    "BF16": ElementType.BFLOAT16,
    "F16": ElementType.FLOAT16,
    "F8_E4M3": ElementType.FLOAT8_E4M3FN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file: its bytes are ``file[start : start + spec.size_bytes]``."""

    spec: TensorSpec
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """Bytes that a file stores under a name: ``file[start : start + size_bytes]``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """Returns the tensors of a file, in the order of their bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a safetensors file, or it is cut short.
    """
    return tuple(_typed(stored) for stored in _read(path)[1])


def read_encoded_header(path: Path) -> tuple[Mapping[str, object], tuple[StoredBytes, ...]]:
    """Returns the metadata of a file of encoded tensors, and their bytes (U8) in file order.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a safetensors file, it is cut short, or it holds something else.
    """
    metadata, encoded = _read(path)
    for stored in encoded:
        if stored.dtype != "U8" or stored.shape != (stored.size_bytes,):
            raise ValueError(
                f"{stored.name!r} is {stored.dtype}{list(stored.shape)} in {stored.size_bytes} "
                "bytes, expected encoded bytes, which are U8 of one dimension"
            )
    return metadata, encoded


def _read(path: Path) -> tuple[Mapping[str, object], tuple[StoredBytes, ...]]:
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError("not a safetensors file: the header is longer than the file")
        try:
            header = json.loads(file.read(header_bytes))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a safetensors file: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file: the header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    found = [_stored(name, entry, data_start) for name, entry in header.items()]
    for stored in found:
        if stored.start < data_start or stored.start + stored.size_bytes > file_bytes:
            raise ValueError(f"cut short: the bytes of tensor {stored.name!r} are not there")
    in_order = tuple(sorted(found, key=lambda stored: stored.start))
    return metadata if isinstance(metadata, dict) else {}, in_order


def _stored(name: str, entry: object, data_start: int) -> StoredBytes:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise ValueError(f"not a safetensors file: tensor {name!r} is {entry!r}")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"tensor {name!r} has shape {shape!r}, expected sizes of at least 0")
    return StoredBytes(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        start=data_start + start,
        size_bytes=stop - start,
    )


def _typed(stored: StoredBytes) -> StoredTensor:
    name, dtype = stored.name, stored.dtype
    if dtype not in _ELEMENT_TYPES:
        raise ValueError(f"tensor {name!r} is {dtype}, expected one of {', '.join(_ELEMENT_TYPES)}")
    spec = TensorSpec(name=name, element_type=_ELEMENT_TYPES[dtype], shape=stored.shape)
    if stored.size_bytes != spec.size_bytes:
        raise ValueError(f"tensor {name!r} is {spec.label} in {stored.size_bytes} bytes")
    return StoredTensor(spec=spec, start=stored.start)
