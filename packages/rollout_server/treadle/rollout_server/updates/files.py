"""File transport: safetensors files in, staged tensors out.

Invariant: a file is opened only if its real path, links followed, lies below the real path of
the directory that the server was started with, and a tensor counts as staged only if its CRC-32
is the announced one. The bytes are copied to host memory before they are checked, so a file that
changes afterwards changes nothing. A process that can write below the directory is trusted: a link
that it puts there between the check and the opening is followed.

Files of a delta hold the encoded bytes of each tensor, as U8, and name the version that they
change (metadata "base_weight_version"). Files of another version are refused as damaged.

Blocking; run it in a thread.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

from treadle.rollout_server.engine import TensorSpec
from treadle.rollout_server.errors import (
    FileCorrupt,
    FileMissing,
    FileOutsideRoot,
    TensorMismatch,
)
from treadle.rollout_server.safetensors_file import read_encoded_header, read_header
from treadle.rollout_server.tensors import ABSENT
from treadle.rollout_server.updates.delta import DeltaEncoding
from treadle.rollout_server.updates.staging import Assembler

_READ_BYTES = 1 << 20  # stays in a core's cache between the checksum and the copy
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Location of the bytes of an update.

    Attributes:
        directory: Below the server's root, or relative to it.
        crc32: Per tensor, of the bytes that the files hold.
    """

    directory: str
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """The bytes of tensor `index` in a file: ``file[start : start + size_bytes]``."""

    index: int
    name: str
    start: int
    size_bytes: int


def confined(path: str, root: Path | None) -> Path:
    """Returns the real path of `path`, which may be relative to `root`.

    Raises:
        FileOutsideRoot: It lies outside `root`, or nobody may see where, or there is no root.
    """
    if root is None or "\0" in path:
        raise FileOutsideRoot(path, None if root is None else str(root))
    real_root = root.resolve()
    try:
        real = Path(os.path.realpath(real_root / path))
    except OSError as error:  # A link that this user may not read, as /proc/1/root.
        raise FileOutsideRoot(path, str(root)) from error
    if not real.is_relative_to(real_root):
        raise FileOutsideRoot(path, str(root))
    return real


def stage_files(
    files: WeightFiles,
    assembler: Assembler,
    *,
    root: Path | None,
    filled: Callable[[int], None],
    delta: DeltaEncoding | None = None,
) -> None:
    """Fills an assembler from the ``*.safetensors`` files of a directory.

    Args:
        files: Files of the tensors in `assembler`.
        root: The only directory that may be read; None: no file may be read.
        filled: Called with the index of each tensor once it is written and checked.
        delta: How the tensors are encoded; None: they are not encoded.

    Raises:
        FileOutsideRoot: The directory, or a file in it, lies outside `root`.
        FileMissing: The directory or a file is missing, or the directory has no such file.
        FileCorrupt: A file is malformed or cut short, or a tensor's bytes are not the
            announced ones; for a delta, it holds other changes than announced.
        TensorMismatch: A tensor is missing, unknown, in two files, or has another type
            or shape than announced.
    """
    folder = confined(files.directory, root)
    paths = [confined(str(path), root) for path in _list(folder)]
    index_of = {spec.name: index for index, spec in enumerate(assembler.tensors)}
    if delta is None:
        places = _locate(paths, assembler.tensors, index_of)
    else:
        places = _locate_changes(paths, folder, delta, index_of)
    for path, parts in places.items():
        try:
            with path.open("rb", buffering=0) as file:
                for part in parts:
                    index = part.index
                    _read(file, path, part, partial(assembler.write, index), files.crc32[index])
                    filled(index)
        except OSError as error:
            raise FileMissing(str(path), error.strerror or str(error)) from error


def _list(folder: Path) -> list[Path]:
    try:
        if not folder.is_dir():
            raise FileMissing(str(folder), "no such directory")
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise FileMissing(str(folder), error.strerror or str(error)) from error
    if not paths:
        raise FileMissing(str(folder), "it holds no *.safetensors file")
    for path in paths:
        if path.exists() and not path.is_file():  # Opening a pipe would wait forever.
            raise FileMissing(str(path), "not a regular file")
    return paths


def _locate(
    paths: Iterable[Path], announced: Sequence[TensorSpec], index_of: Mapping[str, int]
) -> dict[Path, list[_Part]]:
    """Returns the tensors per file; together they are exactly the announced ones."""
    found: dict[Path, list[_Part]] = {}
    seen: set[str] = set()
    for path in paths:
        parts = found[path] = []
        for tensor in _parsed(path, read_header):
            spec = tensor.spec
            if spec.name in seen:
                raise TensorMismatch(spec.name, "in one file", "in two files")
            seen.add(spec.name)
            index = index_of.get(spec.name)
            if index is None or spec != announced[index]:
                wanted = ABSENT if index is None else announced[index].label
                raise TensorMismatch(spec.name, wanted, f"{spec.label} in {path.name}")
            parts.append(_Part(index, spec.name, tensor.start, spec.size_bytes))
    for spec in announced:
        if spec.name not in seen:
            raise TensorMismatch(spec.name, spec.label, f"{ABSENT} from the files")
    return found


def _locate_changes(
    paths: Iterable[Path], folder: Path, delta: DeltaEncoding, index_of: Mapping[str, int]
) -> dict[Path, list[_Part]]:
    """Returns the changes per file; together they are those of exactly the announced tensors.

    Any difference from the announcement counts as damage, since the files carry the same values.
    """
    found: dict[Path, list[_Part]] = {}
    left = dict(index_of)
    for path in paths:
        metadata, stored = _parsed(path, read_encoded_header)
        base = metadata.get("base_weight_version", "(none)")
        if base != str(delta.base_version):
            cause = f"it holds changes of version {base}, announced: {delta.base_version}"
            raise FileCorrupt(str(path), cause)
        parts = found[path] = []
        for tensor in stored:
            index = left.pop(tensor.name, None)
            if index is None or tensor.size_bytes != delta.encoded_bytes[index]:
                wanted = "no more" if index is None else delta.encoded_bytes[index]
                cause = f"it holds {tensor.size_bytes} bytes of changes of {tensor.name!r}"
                raise FileCorrupt(str(path), f"{cause}, announced: {wanted}")
            parts.append(_Part(index, tensor.name, tensor.start, tensor.size_bytes))
    if left:
        cause = f"no file has the changes of {len(left)} tensors, {next(iter(left))!r} for one"
        raise FileMissing(str(folder), cause)
    return found


def _parsed(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise FileMissing(str(path), error.strerror or str(error)) from error
    except ValueError as error:
        raise FileCorrupt(str(path), str(error)) from error


def _read(
    file: FileIO,
    path: Path,
    part: _Part,
    write: Callable[[int, memoryview], None],
    crc32: int,
) -> None:
    file.seek(part.start)
    computed = 0
    done = 0
    buffer = memoryview(bytearray(min(part.size_bytes, _READ_BYTES)))
    while done < part.size_bytes:
        count = file.readinto(buffer[: part.size_bytes - done])
        if not count:
            raise FileCorrupt(str(path), f"cut short in tensor {part.name!r}")
        data = buffer[:count]
        computed = zlib.crc32(data, computed)
        write(done, data)
        done += count
    if computed != crc32:
        raise FileCorrupt(
            str(path),
            f"tensor {part.name!r} has CRC-32 {computed:#010x}, announced {crc32:#010x}",
        )
