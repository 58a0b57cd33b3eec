"""Whether a run begins or goes on in a directory, and from where. Reads only.

Invariant: a directory that holds a run is never begun anew in silence, and its settings are
compared before it is resumed, whatever file of it is missing.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.trainer.checkpoint.manifest import DamageError
from treadle.trainer.checkpoint.resume_check import compare
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    CONFIG,
    Checkpoint,
    Checkpoints,
    RunDirectory,
    RunDirectoryError,
    read_config,
)
from treadle.trainer.config.schema import Config
from treadle.trainer.report import last_saved_step

__all__ = ["ResumePoint", "check_run_directory", "find_resume_point"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        begun: Whether the directory holds steps of the run already.
        checkpoint: What to resume from; None: from the model directory.
        notes: What the user is to know: damage that was found, and settings that have changed.
    """

    begun: bool
    checkpoint: Checkpoint | None
    notes: Sequence[str]

    @property
    def first_step(self) -> int:
        """Number of the first step to train."""
        return 1 if self.checkpoint is None else self.checkpoint.step + 1

    @property
    def after(self) -> int | None:
        """The last step of which the logs keep lines; -1: of none; None: the logs are new."""
        if self.checkpoint is not None:
            return self.checkpoint.step
        return -1 if self.begun else None


def check_run_directory(path: Path, config: Config) -> None:
    """Rejects a directory that a run of this configuration could not use.

    Of a checkpoint's files only the sizes are compared; the run compares their contents.

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
    checkpoints = Checkpoints(path / CHECKPOINTS, keep=config.schedule.keep_checkpoints)
    find_resume_point(RunDirectory(path), checkpoints, config, contents=False)


def find_resume_point(
    directory: RunDirectory, checkpoints: Checkpoints, config: Config, *, contents: bool = True
) -> ResumePoint:
    """Returns where a run of this configuration begins or goes on in the directory.

    Args:
        directory: Of the run.
        checkpoints: Those in it.
        config: Of the run as it would begin or go on.
        contents: Whether to read the files of the checkpoint once, to compare them with its
            manifest; else only their sizes are compared.

    Raises:
        RunDirectoryError: The directory holds another run, or one that cannot go on.
    """
    if not directory.holds_run:
        return ResumePoint(begun=False, checkpoint=None, notes=())
    if config.run.resume == "never":
        raise RunDirectoryError(
            f"run.dir={directory.path} already holds a run and run.resume=never: choose another "
            "directory, or set run.resume=auto to go on with it"
        )
    now = config.model_dump(mode="json")
    try:
        then, damage = read_config(directory.path / CONFIG), None
    except DamageError as error:
        then, damage = None, str(error)
    changes = () if then is None else _changes(directory, then, now)
    whole = checkpoints.newest_whole(contents=contents)
    checkpoint, notes = whole.checkpoint, list(whole.notes)
    if damage is not None:
        changes = _changes(directory, _saved_config(directory, checkpoint, damage), now)
        notes.append(f"{damage}; the settings were compared with the checkpoint's copy")
    if checkpoint is None:
        _check_that_nothing_was_saved(directory, config)
        notes.append("no checkpoint was reached before: beginning again")
    else:
        notes += _resuming(checkpoint)
    return ResumePoint(begun=True, checkpoint=checkpoint, notes=(*notes, *changes))


def _changes(
    directory: RunDirectory, then: Mapping[str, Any], now: Mapping[str, Any]
) -> Sequence[str]:
    changes = compare(then, now)
    if changes.breaking:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds another run: {'; '.join(changes.breaking)}. "
            "Choose another directory, or set what the run began with"
        )
    return [f"changed since the run began: {change}" for change in changes.allowed]


def _saved_config(
    directory: RunDirectory, checkpoint: Checkpoint | None, damage: str
) -> Mapping[str, Any]:
    if checkpoint is not None and checkpoint.config_file is not None:
        return read_config(checkpoint.config_file)
    raise RunDirectoryError(
        f"run.dir={directory.path} holds a run whose settings are unknown: {damage}, and no "
        "checkpoint has a copy. Put it back, or choose another directory"
    )


def _check_that_nothing_was_saved(directory: RunDirectory, config: Config) -> None:
    if (step := last_saved_step(directory.path)) is not None:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds a run that saved a checkpoint at step {step}, and "
            f"{directory.path / CHECKPOINTS} has none: put it back, choose another directory, or "
            "remove this one"
        )
    if config.schedule.save_every is None:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds a run that kept no checkpoint to go on from "
            "(schedule.save_every=null): choose another directory, or remove this one"
        )


def _resuming(checkpoint: Checkpoint) -> Sequence[str]:
    if checkpoint.checked_bytes is None:
        return (
            f"resuming after step {checkpoint.step}; its checkpoint is of release 0.1 and has no "
            "checksums, so it was not checked",
        )
    return (f"resuming after step {checkpoint.step} ({checkpoint.checked_bytes / 1e6:,.1f} MB)",)
