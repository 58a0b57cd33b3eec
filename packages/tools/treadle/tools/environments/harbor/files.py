"""Files between a task's folders on the host and a room, as archives.

Invariant: nothing of a room writes or leads outside the folder that an archive is unpacked in, and
no member that cannot be unpacked loses the others. All functions block on the host's disk.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
from pathlib import Path, PurePosixPath

from treadle.tools.environments.harbor.image import UnsupportedTaskError


def find_sources(folder: Path, pattern: str) -> list[tuple[str, Path]]:
    """Returns what a COPY names: the name of each, and the file or folder, links followed.

    Args:
        pattern: Path below it, with Docker's wildcards; `.` is the folder itself.

    Raises:
        UnsupportedTaskError: There is none, or it is a link that leads out of the folder.
    """
    inside = str(PurePosixPath(pattern.strip("/")))
    named = [folder] if inside == "." else sorted(folder.glob(inside))
    if not named:
        raise UnsupportedTaskError(f"there is no {pattern} in {folder}")
    found = []
    for path in named:
        target = path.resolve()
        if not target.is_relative_to(folder.resolve()):
            raise UnsupportedTaskError(
                f"{path} is a link to {target}, which is not in {folder}: copy the file there"
            )
        found.append((path.name, target))
    return found


def pack(name: str, path: Path) -> bytes:
    """Returns an archive of a file or folder under a name; `.` for what a folder holds."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(path, arcname=name)
    return buffer.getvalue()


def pack_command(folder: str) -> list[str]:
    """Returns a command that prints an archive of a room's folder; status 1 is a warning.

    Files that it may not read are left out; one that changes is there as it was read.
    """
    options = ["--ignore-failed-read", "--warning=no-file-changed", "--hard-dereference"]
    return ["tar", "-c", *options, "-C", folder, "."]


def unpack(data: bytes, folder: Path) -> None:
    """Writes the files, folders and links of an archive that may come from anyone.

    Members that lead out of the folder, special files and what has no place are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            with contextlib.suppress(KeyError, OSError, tarfile.TarError):  # it alone is lost
                archive.extract(member, folder, filter="data")
