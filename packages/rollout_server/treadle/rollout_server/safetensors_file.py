"""A safetensors file: which tensors it holds and where their bytes lie.

Invariant: a header that parses describes byte ranges inside the file, one per tensor, as
long as its type and shape say. Only the header is read here, with the standard library,
so that neither torch nor numpy is needed to move weights. The format: eight bytes of
little-endian header length, a JSON object, then the data
(https://github.com/huggingface/safetensors#format).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from treadle.rollout_server.engine import ElementType, TensorSpec

_MAX_HEADER_BYTES = 100_000_000  # the format's own bound
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


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of a file, in the order of their bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a safetensors file, or it is cut short.
    """
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError("not a safetensors file: the header is longer than the file")
        try:
            header = json.loads(file.read(header_bytes))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a safetensors file: the header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file: the header is no JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    stored = [_stored(name, entry, data_start) for name, entry in header.items()]
    for tensor in stored:
        if tensor.start < data_start or tensor.start + tensor.spec.size_bytes > file_bytes:
            raise ValueError(f"cut short: the bytes of tensor {tensor.spec.name!r} are not there")
    return tuple(sorted(stored, key=lambda tensor: tensor.start))


def _stored(name: str, entry: object, data_start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise ValueError(f"not a safetensors file: tensor {name!r} is {entry!r}")
    if dtype not in _ELEMENT_TYPES:
        raise ValueError(f"tensor {name!r} is {dtype}, expected one of {', '.join(_ELEMENT_TYPES)}")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"tensor {name!r} has shape {shape!r}, expected sizes of at least 0")
    spec = TensorSpec(name=name, element_type=_ELEMENT_TYPES[dtype], shape=tuple(shape))
    if stop - start != spec.size_bytes:
        raise ValueError(f"tensor {name!r} is {spec.label} in {stop - start} bytes")
    return StoredTensor(spec=spec, start=data_start + start)
