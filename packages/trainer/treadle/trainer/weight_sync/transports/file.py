"""File transport: weights as safetensors files that the servers read, one file per sending rank.

A file is written tensor by tensor and appears under its name only when it is complete and on
disk. The checksum of each tensor goes to the driver, which announces them in BeginUpdate.

Metadata say what a file is: "weight_version"; and of changes, each tensor's encoded bytes as U8,
"base_weight_version" and the "element_type" of the values.
"""

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treadle.trainer.policy.commands import SendReport, WriteFiles
from treadle.trainer.policy.types import ElementType
from treadle.trainer.weight_sync.payload import WeightSource, num_bytes, tensor_bytes

__all__ = ["FileEntry", "write_file", "write_files"]

_NAMES: dict[ElementType, str] = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """What a file says of one tensor."""

    name: str
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    num_bytes: int


def write_files(policy: WeightSource, command: WriteFiles, *, rank: int) -> SendReport:
    """Writes this rank's weights below `command.directory`; every rank must call it.

    Raises:
        OSError: the disk is full or the directory cannot be written; no file appears.
    """
    entries = [
        FileEntry(
            name=spec.name,
            dtype=_NAMES[command.element_type],
            shape=spec.shape,
            num_bytes=num_bytes(spec, command.element_type),
        )
        for spec in policy.weight_specs()
        if spec.sender == rank
    ]
    export = policy.export_weights()
    if not entries:
        for _ in export:  # takes part in the others' gathering
            pass
    names = {entry.name for entry in entries}
    mine = (named for named in export if named.name in names)
    parts = ((named.name, tensor_bytes(named.tensor, command.element_type)) for named in mine)
    return write_file(command, entries, parts, rank=rank)


def write_file(
    command: WriteFiles,
    entries: Sequence[FileEntry],
    parts: Iterable[tuple[str, memoryview]],
    *,
    rank: int,
) -> SendReport:
    """Writes a rank's file, if it has anything to write.

    Args:
        command: says where, and of which version.
        entries: all of the file.
        parts: their names and bytes, in the same order.
        rank: names the file.

    Raises:
        OSError: the disk is full or the directory cannot be written; no file appears.
    """
    if not entries:
        return SendReport(num_bytes=0, crc32={}, errors={})
    path = command.directory / f"rank-{rank:05d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    header = _header(entries, _metadata(command))
    crc32: dict[str, int] = {}
    try:
        with partial.open("wb") as file:
            file.write(header)
            for entry, (name, data) in zip(entries, parts, strict=True):
                assert entry.name == name, "weights come in the order of their specs"
                file.write(data)
                crc32[name] = zlib.crc32(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return SendReport(num_bytes=sum(e.num_bytes for e in entries), crc32=crc32, errors={})


def _metadata(command: WriteFiles) -> dict[str, str]:
    metadata = {"weight_version": str(command.version)}
    if command.base_version is not None:
        metadata["base_weight_version"] = str(command.base_version)
        metadata["element_type"] = command.element_type
    return metadata


def _header(entries: Sequence[FileEntry], metadata: dict[str, str]) -> bytes:
    """The safetensors header: its length, then JSON padded with spaces to 8 bytes."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
