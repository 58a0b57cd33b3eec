"""Seals: the SHA-256 of what a run has written, so that a later change is found.

`seals.jsonl` has a line for each trajectory file and for each line of `metrics.jsonl`. A seal finds
accidents and changes of a file alone; who changes a file and its seal is found by what `treadle
verify` computes again.

Invariant: a line is appended after what it seals is written. Lines are appended in one write, from
any thread. A resumed run removes the seals of what it removes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["SEALS", "keep_seals", "read_seals", "seal", "seal_file", "sha256_of"]

SEALS: Final = "seals.jsonl"


def seal(run_dir: Path, step: int, name: str, sha256: str) -> None:
    """Appends a seal.

    Args:
        name: The path within the run directory, or `metrics.jsonl` for the step's line in it.
    """
    line = json.dumps({"step": step, "name": name, "sha256": sha256}) + "\n"
    with (run_dir / SEALS).open("ab", buffering=0) as file:
        file.write(line.encode())


def seal_file(run_dir: Path, step: int, name: str) -> None:
    """Appends the seal of a file as it is now."""
    seal(run_dir, step, name, sha256_of(run_dir / name))


def sha256_of(path: Path) -> str:
    """Returns the digest of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_seals(run_dir: Path) -> Iterator[tuple[int, str, str]]:
    """Yields (step, name, digest) of each line; none of a run without seals.

    Raises:
        ValueError: A line is damaged; the message has its number.
    """
    path = run_dir / SEALS
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            yield int(value["step"]), str(value["name"]), str(value["sha256"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {SEALS} is damaged: {error!r}") from None


def keep_seals(run_dir: Path, last_step: int | None) -> None:
    """Removes the seals of later steps; None: all of them. What cannot be read goes too."""
    path = run_dir / SEALS
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if last_step is not None and json.loads(line)["step"] <= last_step:
                kept.append(line)
        except (KeyError, TypeError, ValueError, RecursionError):
            continue
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(kept))
    os.replace(partial, path)
