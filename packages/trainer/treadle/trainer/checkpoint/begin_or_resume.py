"""Whether a run may begin, or go on, in a directory. Reads only."""

import os
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.checkpoint.resume_check import compare
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    Checkpoint,
    Checkpoints,
    RunDirectory,
    RunDirectoryError,
)
from treadle.trainer.config.schema import Config

__all__ = ["changed_settings", "check_run_directory"]


def check_run_directory(path: Path, config: Config) -> None:
    """Rejects a directory that a run of this configuration could not use.

    Raises:
        RunDirectoryError: It cannot be made, or holds another run, or one that cannot go on.
    """
    there = path
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise RunDirectoryError(f"run.dir={path}: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"run.dir={path}: {there} cannot be written")
    checkpoint = Checkpoints(path / CHECKPOINTS, keep=config.schedule.keep_checkpoints).latest()
    changed_settings(RunDirectory(path), config, checkpoint)


def changed_settings(
    directory: RunDirectory, config: Config, checkpoint: Checkpoint | None
) -> Sequence[str]:
    """Returns the settings that have changed since the run began, one line each.

    Args:
        directory: Of the run; a new one has no changes.
        config: Of the run as it would begin or go on.
        checkpoint: The latest of the directory.

    Raises:
        RunDirectoryError: It holds another run, or one that cannot go on.
    """
    if not directory.holds_run:
        return []
    if config.run.resume == "never":
        raise RunDirectoryError(
            f"run.dir={directory.path} already holds a run and run.resume=never: choose another "
            "directory, or set run.resume=auto to go on with it"
        )
    changes = compare(directory.read_config(), config.model_dump(mode="json"))
    if changes.breaking:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds another run: {'; '.join(changes.breaking)}. "
            "Choose another directory, or set what the run began with"
        )
    if checkpoint is None and config.schedule.save_every is None:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds a run that kept no checkpoint to go on from "
            "(schedule.save_every=null): choose another directory, or remove this one"
        )
    return changes.allowed
