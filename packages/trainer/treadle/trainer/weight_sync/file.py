"""File transport: weights as safetensors files that the servers read, one file per sending rank.

A file is written tensor by tensor and appears under its name only when it is complete and on
disk. The checksum of each tensor goes to the driver, which announces them in BeginUpdate.
"""

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from treadle.trainer.policy import ElementType, NamedTensor, TensorSpec
from treadle.trainer.policy_commands import SendReport, WriteFiles
from treadle.trainer.weight_sync.payload import WeightSource, num_bytes, tensor_bytes

__all__ = ["write_files"]

_NAMES: dict[ElementType, str] = {"float32": "F32", "bfloat16": "BF16"}


def write_files(policy: WeightSource, command: WriteFiles, *, rank: int) -> SendReport:
    """Writes this rank's weights below `command.directory`; every rank must call it.

    Raises:
        OSError: the disk is full or the directory cannot be written; no file appears.
    """
    specs = [spec for spec in policy.weight_specs() if spec.sender == rank]
    names = {spec.name for spec in specs}
    export = policy.export_weights()
    if not specs:
        for _ in export:  # takes part in the others' gathering
            pass
        return SendReport(num_bytes=0, crc32={}, errors={})
    mine = (named for named in export if named.name in names)
    path = command.directory / f"rank-{rank:05d}.safetensors"
    crc32 = _write(path, specs, mine, command.element_type)
    total = sum(num_bytes(spec, command.element_type) for spec in specs)
    return SendReport(num_bytes=total, crc32=crc32, errors={})


def _write(
    path: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterator[NamedTensor],
    element_type: ElementType,
) -> dict[str, int]:
    crc32: dict[str, int] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(_header(specs, element_type))
            for spec, named in zip(specs, tensors, strict=True):
                assert spec.name == named.name, "weights come in the order of their specs"
                data = tensor_bytes(named.tensor, element_type)
                file.write(data)
                crc32[spec.name] = zlib.crc32(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return crc32


def _header(specs: Sequence[TensorSpec], element_type: ElementType) -> bytes:
    """The safetensors header: its length, then JSON padded with spaces to 8 bytes."""
    entries = {}
    offset = 0
    for spec in specs:
        end = offset + num_bytes(spec, element_type)
        entries[spec.name] = {
            "dtype": _NAMES[element_type],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
