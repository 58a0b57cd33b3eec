"""File transport: the weights travel as safetensors files, one file per sending rank.

Data flow: the ranks write their files below a folder of the update. The driver begins the update
on all servers with the checksums of the tensors; the servers read the files before they answer.
Then the driver commits.

Who waits for whom: the driver waits for all ranks, then for all servers. A server that could not
read the files gets them written again, under another update, while the others already serve.

Invariants: a file appears under its name only when it is complete and on disk. The files of an
attempt are removed when it ends, however it ends.

The files' metadata are "weight_version"; a file of changes holds each tensor's encoding as U8, and
has "base_weight_version" and the "element_type" of the values too.
"""

import asyncio
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome
from treadle.policy.weight_sync.payload import WeightSource, num_bytes, own_weights, tensor_bytes
from treadle.policy.weight_sync.update_round import UpdateRound

__all__ = ["FileEntry", "publish_files", "send_files", "write_file", "write_files"]

_NAMES: dict[str, str] = {"float32": "F32", "bfloat16": "BF16"}


# --- the driver's side ---------------------------------------------------------------------------


async def publish_files(update_round: UpdateRound, directory: Path) -> None:
    """Leaves in `update_round.live` the servers that sample from the version.

    Args:
        directory: Where the files go; the servers can read below it.
    """
    attempts = update_round.config.max_push_attempts
    done: dict[str, WeightSyncClient] = {}
    for attempt in range(attempts):
        await send_files(update_round, directory, last=attempt + 1 == attempts)
        await update_round.commit()
        done |= update_round.live
        if not update_round.to_retry:
            break
        update_round.live, update_round.to_retry = update_round.to_retry, {}
        update_round.update_id = uuid.uuid4().hex
    update_round.live = done


async def send_files(update_round: UpdateRound, directory: Path, *, last: bool = False) -> None:
    """Leaves in `update_round.live` the servers that have read every byte.

    Servers that could not read the files go to `update_round.to_retry`; on the `last` attempt they
    fail.
    """
    delta = update_round.delta
    folder = directory / update_round.update_id
    request = weights_pb.WriteFilesRequest(
        directory=str(folder),
        element_type=update_round.element_type,
        version=update_round.version,
        base_version=None if delta is None else delta.base_version,
    )
    try:
        reports: list[weights_pb.WriteFilesResponse] = await update_round.policy.call(request)
        checksums = {name: crc for report in reports for name, crc in report.crc32.items()}
        begin = update_round.begin_request()
        begin.file.directory = str(folder)
        begin.file.crc32.extend(checksums[spec.name] for spec in update_round.specs)
        await update_round.begin(begin, again=None if last else Outcome.RESTART)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


# --- the rank's side -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One tensor in a file's header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def write_files(
    policy: WeightSource, request: weights_pb.WriteFilesRequest, *, rank: int
) -> weights_pb.WriteFilesResponse:
    """Writes this rank's weights below `request.directory`. Every rank must call it.

    Raises:
        OSError: The disk is full or the directory cannot be written; no file appears.
    """
    specs = policy.weight_specs()
    entries = [
        FileEntry(
            name=spec.name,
            dtype=_NAMES[request.element_type],
            shape=spec.shape,
            num_bytes=num_bytes(spec, request.element_type),
        )
        for spec in specs
        if spec.sender == rank
    ]
    parts = (
        (named.name, tensor_bytes(named.tensor, request.element_type))
        for _, named in own_weights(policy, specs, rank)
    )
    return write_file(request, entries, parts, rank=rank)


def write_file(
    request: weights_pb.WriteFilesRequest,
    entries: Sequence[FileEntry],
    parts: Iterable[tuple[str, memoryview]],
    *,
    rank: int,
) -> weights_pb.WriteFilesResponse:
    """Writes a rank's file; none if the rank has no entries.

    Args:
        parts: Their names and bytes, in the same order; run to the end.

    Raises:
        OSError: The disk is full or the directory cannot be written; no file appears.
    """
    if not entries:
        for _ in parts:  # the export is collective: the other ranks wait for this one
            pass
        return weights_pb.WriteFilesResponse()
    path = Path(request.directory) / f"rank-{rank:05d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    crc32: dict[str, int] = {}
    try:
        with partial.open("wb") as file:
            file.write(_header(entries, _metadata(request)))
            for entry, (name, data) in zip(entries, parts, strict=True):
                assert entry.name == name, "weights come in the order of their specs"
                file.write(data)
                crc32[name] = zlib.crc32(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        # The system names no path where a write fails.
        what = f"{error.strerror} (make room, or set sync.transport.directory to another disk)"
        raise OSError(error.errno, what, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
    return weights_pb.WriteFilesResponse(num_bytes=sum(e.num_bytes for e in entries), crc32=crc32)


def _metadata(request: weights_pb.WriteFilesRequest) -> dict[str, str]:
    metadata = {"weight_version": str(request.version)}
    if request.HasField("base_version"):
        metadata["base_weight_version"] = str(request.base_version)
        metadata["element_type"] = request.element_type
    return metadata


def _header(entries: Sequence[FileEntry], metadata: dict[str, str]) -> bytes:
    """Returns the safetensors header: its length, then JSON padded with spaces to 8 bytes."""
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
