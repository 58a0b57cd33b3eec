"""File transport: safetensors files in, staged tensors out.

Invariant: a file is opened only when its real path, links followed, lies below the real
path of the directory that the server was started with; and nothing counts as staged whose
CRC-32 is not the announced one. The bytes are copied to host memory before they are
checked, so a file that changes afterwards changes nothing. Whoever can write below the
directory is trusted: a link put there between the check and the opening is followed.

Blocking; run it in a thread.
"""

import os
import zlib
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path

from treadle.rollout_server.engine import TensorSpec
from treadle.rollout_server.errors import (
    FileCorrupt,
    FileMissing,
    FileOutsideRoot,
    TensorMismatch,
)
from treadle.rollout_server.safetensors_file import StoredTensor, read_header
from treadle.rollout_server.tensors import ABSENT
from treadle.rollout_server.updates.assemble import Assembler

_READ_BYTES = 4 << 20


def confined(path: str, root: Path | None) -> Path:
    """The real path behind `path`, which may be relative to `root`.

    Raises:
        FileOutsideRoot: It lies elsewhere, or the server has no root.
    """
    if root is None or "\0" in path:
        raise FileOutsideRoot(path, None if root is None else str(root))
    real_root = root.resolve()
    real = Path(os.path.realpath(real_root / path))
    if not real.is_relative_to(real_root):
        raise FileOutsideRoot(path, str(root))
    return real


def stage_files(
    directory: str, crc32: Sequence[int], assembler: Assembler, *, root: Path | None
) -> None:
    """Fills an assembler from the ``*.safetensors`` files of a directory.

    Args:
        directory: Below `root`, or relative to it.
        crc32: Of the bytes of ``assembler.tensors[i]``.
        assembler: Empty.
        root: The only place that may be read; None for nowhere.

    Raises:
        FileOutsideRoot: The directory, or a file in it, lies outside `root`.
        FileMissing: The directory or a file is not there, or there is no such file.
        FileCorrupt: A file is malformed or cut short, or a tensor's bytes are not the
            announced ones.
        TensorMismatch: A tensor is missing, unknown, in two files, or has another type
            or shape than announced.
    """
    paths = [confined(str(path), root) for path in _list(confined(directory, root))]
    places = _locate(paths, assembler.tensors)
    index_of = {spec.name: index for index, spec in enumerate(assembler.tensors)}
    for path, stored in places.items():
        try:
            with path.open("rb", buffering=0) as file:
                for tensor in stored:
                    index = index_of[tensor.spec.name]
                    _read(file, path, tensor, assembler.buffer(index), crc32[index])
                    assembler.filled(index)
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
        if path.exists() and not path.is_file():  # To open a pipe would wait for ever.
            raise FileMissing(str(path), "not a regular file")
    return paths


def _locate(
    paths: Iterable[Path], announced: Sequence[TensorSpec]
) -> dict[Path, tuple[StoredTensor, ...]]:
    """Which file holds which tensors; together they are exactly the announced ones."""
    wanted = {spec.name: spec for spec in announced}
    found: dict[Path, tuple[StoredTensor, ...]] = {}
    names: set[str] = set()
    for path in paths:
        try:
            found[path] = read_header(path)
        except OSError as error:
            raise FileMissing(str(path), error.strerror or str(error)) from error
        except ValueError as error:
            raise FileCorrupt(str(path), str(error)) from error
        for tensor in found[path]:
            spec = tensor.spec
            if spec.name in names:
                raise TensorMismatch(spec.name, "in one file", "in two files")
            names.add(spec.name)
            if spec.name not in wanted:
                raise TensorMismatch(spec.name, ABSENT, f"{spec.label} in {path.name}")
            if spec != wanted[spec.name]:
                raise TensorMismatch(
                    spec.name, wanted[spec.name].label, f"{spec.label} in {path.name}"
                )
    for spec in announced:
        if spec.name not in names:
            raise TensorMismatch(spec.name, spec.label, f"{ABSENT} from the files")
    return found


def _read(file: FileIO, path: Path, tensor: StoredTensor, into: memoryview, crc32: int) -> None:
    file.seek(tensor.start)
    computed = 0
    done = 0
    while done < len(into):
        part = into[done : done + _READ_BYTES]
        count = file.readinto(part)
        if not count:
            raise FileCorrupt(str(path), f"cut short in tensor {tensor.spec.name!r}")
        computed = zlib.crc32(part[:count], computed)
        done += count
    if computed != crc32:
        raise FileCorrupt(
            str(path),
            f"tensor {tensor.spec.name!r} has CRC-32 {computed:#010x}, announced {crc32:#010x}",
        )
