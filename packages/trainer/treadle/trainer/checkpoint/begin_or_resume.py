"""Whether a run begins or resumes in a directory, and from where. Reads only.

Invariant: a directory that holds a run is never silently begun again, and its settings are
compared before it is resumed, whatever file of it is missing.

| run.resume | the directory is new | it holds a run |
|---|---|---|
| auto | begins with `model.path` | continues from its latest checkpoint |
| never | begins with `model.path` | error |
| another run, or its checkpoint | begins there | continues if it began there, else error |
| a checkpoint of this run | error | is set back to it |

The same command given again continues, also where it names a checkpoint.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.report import MetricsLog, last_saved_step
from treadle.trainer.report.seals import seal_file

__all__ = [
    "ResumePoint",
    "check_run_directory",
    "check_steps_left",
    "find_resume_point",
    "open_metrics",
]

_WANTED = "it must be a run directory, or RUN/checkpoints/step-N of one"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run resumes.

    Attributes:
        begun: Whether the directory holds steps of the run already.
        checkpoint: The checkpoint that the run resumes from; None: it begins with the model
            directory.
        notes: Notes for the user: damage that was found, and settings that have changed.
        origin: The other run that `checkpoint` is of; None: it is of this run.
        set_back: Whether `checkpoint` is to become the latest of this run.
    """

    begun: bool
    checkpoint: Checkpoint | None
    notes: Sequence[str]
    origin: Path | None = None
    set_back: bool = False

    @property
    def first_step(self) -> int:
        """Number of the first step to train."""
        return 1 if self.checkpoint is None else self.checkpoint.step + 1

    @property
    def after(self) -> int | None:
        """The last step of which the logs keep lines; -1: of none; None: the logs are new."""
        if not self.begun:
            return None
        return -1 if self.checkpoint is None else self.checkpoint.step


def check_run_directory(path: Path, config: AnyConfig) -> ResumePoint:
    """Returns where a run would begin or resume; rejects a directory that it could not use.

    Of a checkpoint's files only the sizes are compared; the run compares their contents.

    Raises:
        RunDirectoryError: It cannot be made, or holds another run, or one that cannot be resumed.
    """
    there = path
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise RunDirectoryError(f"run.dir={path}: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"run.dir={path}: {there} cannot be written")
    checkpoints = Checkpoints(path / CHECKPOINTS, keep=config.schedule.keep_checkpoints)
    return find_resume_point(RunDirectory(path), checkpoints, config, contents=False)


def check_steps_left(resume: ResumePoint, total_steps: int) -> None:
    """Rejects a run that would begin after its last step.

    Raises:
        RunDirectoryError: The other run's checkpoint leaves nothing to train.
    """
    if resume.origin is not None and resume.first_step > total_steps:
        raise RunDirectoryError(
            f"run.resume: the checkpoint in {resume.origin} is of step {resume.first_step - 1}, "
            f"and the run has {total_steps}: raise schedule.total_steps or total_epochs"
        )


def find_resume_point(
    directory: RunDirectory, checkpoints: Checkpoints, config: AnyConfig, *, contents: bool = True
) -> ResumePoint:
    """Returns where a run of this configuration begins or resumes in the directory.

    Args:
        config: Configuration of the run as it would begin or resume.
        contents: Whether to read the files of the checkpoint once, to compare them with its
            manifest; else only their sizes are compared.

    Raises:
        RunDirectoryError: The directory holds another run, or one that cannot be resumed.
    """
    path = config.run.resume if isinstance(config.run.resume, Path) else None
    here = directory.path.resolve()
    of_this_run = path is not None and path.resolve().is_relative_to(here)
    if not directory.holds_run:
        if path is None:
            return ResumePoint(begun=False, checkpoint=None, notes=())
        return _from_other_run(path, config, begun=False, contents=contents)
    if config.run.resume == "never":
        raise RunDirectoryError(
            f"run.dir={directory.path} already holds a run and run.resume=never: choose another "
            "directory, or set run.resume=auto to resume it"
        )
    now = config.model_dump(mode="json")
    try:
        then, damage = read_config(directory.path / CONFIG), None
    except DamageError as error:
        then, damage = None, str(error)
    changes = () if then is None else _changes(directory, then, now)
    set_back = (
        path is not None
        and of_this_run
        and path.resolve() != here
        and str(path) != _resume_of(then)
    )
    own: Checkpoint | None
    found: Sequence[str]
    if set_back and path is not None:
        own, _, found = _checkpoint_of(path, contents=contents)
    else:
        whole = checkpoints.newest_whole(contents=contents)
        own, found = whole.checkpoint, whole.notes
    notes = list(found)
    if own is not None:
        _check_schedule(own, config)
    if then is None:
        then = _saved_config(directory, own, damage or "")
        changes = _changes(directory, then, now)
        notes.append(f"{damage}; the settings were compared with the checkpoint's copy")
    if set_back and own is not None:
        notes.append(f"set back to step {own.step}: later steps are trained again")
        return ResumePoint(begun=True, checkpoint=own, notes=(*notes, *changes), set_back=True)
    began = _resume_of(then)
    if path is not None and not of_this_run and str(path) != began:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds a run that did not begin from run.resume={path}: "
            "choose another directory, or set run.resume=auto to resume it"
        )
    if own is not None:
        notes += _resuming(own)
        return ResumePoint(begun=True, checkpoint=own, notes=(*notes, *changes))
    _check_that_nothing_was_saved(directory, config)
    again = _begin_again(directory, config, began, contents=contents)
    return replace(again, notes=(*notes, *again.notes, *changes))


def _begin_again(
    directory: RunDirectory, config: AnyConfig, began: str, *, contents: bool
) -> ResumePoint:
    """Returns where a run begins that has begun and saved nothing."""
    if began in ("auto", "never"):
        note = "no checkpoint was reached before: beginning again"
        return ResumePoint(begun=True, checkpoint=None, notes=(note,))
    if not isinstance(config.run.resume, Path):
        raise RunDirectoryError(
            f"run.dir={directory.path} holds a run that began from {began} and saved no "
            f"checkpoint: give run.resume={began} again, or choose another directory"
        )
    return _from_other_run(config.run.resume, config, begun=True, contents=contents)


def open_metrics(run_dir: Path, resume: ResumePoint) -> MetricsLog:
    """Opens the metrics log; the checkpoint has the last step's line, if the trainer died first."""
    log = MetricsLog(run_dir / "metrics.jsonl", resume_after=resume.after)
    seal_file(run_dir, max(log.last_step, 0), CONFIG)
    if resume.origin is not None:
        return log
    if resume.checkpoint is not None and log.last_step < resume.checkpoint.step:
        log.append(resume.checkpoint.step, resume.checkpoint.metrics)
    return log


def _resume_of(config: Mapping[str, Any] | None) -> str:
    """Returns `run.resume` of a run's configuration; releases before it had a path had auto."""
    run = (config or {}).get("run")
    return str(run.get("resume", "auto")) if isinstance(run, Mapping) else "auto"


def _checkpoint_of(path: Path, *, contents: bool) -> tuple[Checkpoint, Path, Sequence[str]]:
    """Returns the checkpoint that `run.resume` names, its run, and what is wrong with others.

    Raises:
        RunDirectoryError: There is none, or it is damaged.
    """
    if not path.exists():
        raise RunDirectoryError(f"run.resume={path} does not exist; {_WANTED}")
    digits = path.name.removeprefix("step-")
    if path.parent.name == CHECKPOINTS and path.name != digits and digits.isdecimal():
        there = Checkpoints(path.parent, keep=1)
        return there.at(int(digits), to="resume", contents=contents), path.parent.parent, ()
    if not (path / CHECKPOINTS).is_dir():
        hint = ""
        if path.name.startswith("global_step_") or any(path.glob("global_step_*")):
            hint = "; a checkpoint of verl is exported to a model first: model.path"
        raise RunDirectoryError(f"run.resume={path} has no checkpoint; {_WANTED}{hint}")
    whole = Checkpoints(path / CHECKPOINTS, keep=1).newest_whole(contents=contents)
    if whole.checkpoint is None:
        raise RunDirectoryError(f"run.resume={path} has no checkpoint; {_WANTED}")
    return whole.checkpoint, path, whole.notes


def _from_other_run(path: Path, config: AnyConfig, *, begun: bool, contents: bool) -> ResumePoint:
    """Returns the start of a run at a checkpoint of another one.

    Raises:
        RunDirectoryError: There is none, it is damaged, or it is of another model or kind of run.
    """
    checkpoint, origin, notes = _checkpoint_of(path, contents=contents)
    file = checkpoint.config_file or origin / CONFIG
    try:
        then = read_config(file)
    except DamageError as error:
        raise RunDirectoryError(
            f"run.resume={path}: the settings of its run are unknown: {error} in {file.parent}"
        ) from None
    now = config.model_dump(mode="json")
    kinds = [_kind(each) for each in (then, now)]
    if kinds[0] != kinds[1] and "sft" in kinds:
        raise RunDirectoryError(
            f"run.resume={path} is of a run with schedule.kind={kinds[0]}, and this one has "
            f"{kinds[1]}: begin with its model instead, model.path={origin}"
        )
    _check_schedule(checkpoint, config)
    changes = compare(then, now)
    if models := [change for change in changes.breaking if change.startswith("model.")]:
        raise RunDirectoryError(
            f"run.resume={path} is of another model: {'; '.join(models)}. Set what it began with"
        )
    return ResumePoint(
        begun=begun,
        checkpoint=checkpoint,
        notes=(
            *notes,
            f"beginning after step {checkpoint.step} of {origin}, with its weights and optimizer",
            *(f"not as in {origin}: {line}" for line in (*changes.breaking, *changes.allowed)),
        ),
        origin=origin,
    )


def _kind(config: Mapping[str, Any]) -> str:
    schedule = config.get("schedule")
    return str(schedule.get("kind", "sync")) if isinstance(schedule, Mapping) else "sync"


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


def _check_that_nothing_was_saved(directory: RunDirectory, config: AnyConfig) -> None:
    if (step := last_saved_step(directory.path)) is not None:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds a run that saved a checkpoint at step {step}, and "
            f"{directory.path / CHECKPOINTS} has none: put it back, choose another directory, or "
            "remove this one"
        )
    if not config.schedule.resumable:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds a run that kept no checkpoint to resume from "
            "(schedule.save_every=null, schedule.save_minutes=null): choose another directory, or "
            "remove this one"
        )


def _check_schedule(checkpoint: Checkpoint, config: AnyConfig) -> None:
    """Rejects the synchronous schedule where groups were begun that it would not train on.

    Raises:
        RunDirectoryError: See above.
    """
    begun = (checkpoint.groups or {}).get("untrained")
    if begun and config.schedule.kind == "sync":
        raise RunDirectoryError(
            f"the checkpoint of step {checkpoint.step} is of a schedule that samples beside "
            f"training, with {len(begun)} groups begun and not trained on, and schedule.kind=sync "
            "would leave them out: keep schedule.kind"
        )


def _resuming(checkpoint: Checkpoint) -> Sequence[str]:
    if checkpoint.checked_bytes is None:
        return (
            f"resuming after step {checkpoint.step}; its checkpoint is of release 0.1 and has no "
            "checksums, so it was not checked",
        )
    return (f"resuming after step {checkpoint.step} ({checkpoint.checked_bytes / 1e6:,.1f} MB)",)
