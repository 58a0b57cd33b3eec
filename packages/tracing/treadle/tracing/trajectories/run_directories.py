"""Checks that directories are runs, and gives each a short, unique name to display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from treadle.tracing.trajectories.schema import DIRECTORY

__all__ = ["CONFIG", "METRICS", "STATUS", "NotARunError", "name_runs"]

CONFIG: Final = "config.json"
METRICS: Final = "metrics.jsonl"
STATUS: Final = "status.json"


class NotARunError(ValueError):
    """A directory has none of the files of a run; the message names it."""


def name_runs(directories: Sequence[Path]) -> Mapping[Path, str]:
    """Returns the resolved directory of each run, and the shortest name that no other one has.

    Raises:
        NotARunError: A directory is missing, has no file of a run, or is named twice.
    """
    resolved = [directory.resolve() for directory in directories]
    for path, directory in zip(resolved, directories, strict=True):
        if not path.is_dir():
            raise NotARunError(
                f"{directory} is not a directory: name a run's directory, its run.dir"
            )
        if not any((path / name).exists() for name in (METRICS, STATUS, CONFIG, DIRECTORY)):
            raise NotARunError(
                f"{directory} is not a run directory: {METRICS}, {STATUS}, {CONFIG} and "
                f"{DIRECTORY}/ are missing"
            )
        if resolved.count(path) > 1:
            raise NotARunError(f"{directory} is named twice: name each run once")
    return dict(zip(resolved, _names(resolved), strict=True))


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest end of each path that no other path has."""
    for parts in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
