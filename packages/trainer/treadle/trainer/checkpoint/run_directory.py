"""The run directory's state: its checkpoints, its configuration and its lock.

Invariant: a checkpoint is used only after its files were compared with its manifest. It is written
under a `.partial` name, the manifest last, then renamed, then named in `latest`, each step atomic.
The next trainer removes what a killed one left behind. `latest` is a hint: it names the checkpoint
to try first, so a run is set back by writing another name into it; if it is missing or names no
valid checkpoint, the newest complete one is used. One trainer uses a run directory at a time: it
holds a lock on `lock`, which the operating system frees when the trainer dies. `best` names the
checkpoint that validation chose, if it chooses one; that checkpoint is not removed.

Besides the policy a checkpoint needs only the step: data order and seeds are functions of it. It
also carries the step's metrics, in case the trainer dies before they are logged, and a copy of
`config.json`, which identifies a run that lost its own.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from treadle.trainer.checkpoint.manifest import (
    MANIFEST,
    DamageError,
    check_manifest,
    write_json,
    write_manifest,
)
from treadle.trainer.report.seals import seal_file

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "CRITIC",
    "HF",
    "POLICY",
    "Best",
    "Checkpoint",
    "Checkpoints",
    "NewestWhole",
    "RunDirectory",
    "RunDirectoryError",
    "new_run_dir",
    "read_config",
    "write_json",
]

_FORMAT = 2
_WITHOUT_MANIFEST = 1
"""The format of release 0.1."""
_STATE = "state.json"
_LATEST = "latest"
_BEST = "best"
CONFIG = "config.json"
"""The configuration in a run directory; each checkpoint has a copy as it was then."""
CHECKPOINTS = "checkpoints"
"""Folder of a run directory that holds its checkpoints."""
PROFILES = "profiles"
"""Folder of the policy ranks' profiles."""
POLICY = "policy"
"""Folder of a checkpoint that holds the policy's tensors and optimizer state."""
CRITIC = "critic"
"""Folder of a checkpoint that holds the critic's, if there is a critic."""
HF = "hf"
"""Folder of a checkpoint that holds the model as a Hugging Face directory."""


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used or written; the message names it, the cause and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files were compared with its manifest.

    Attributes:
        critic_directory: The critic's tensors, if there is a critic.
        hf_directory: The model as a Hugging Face directory; None if the checkpoint has none.
        config_file: The configuration of the run as it was then; None if the checkpoint has none.
        groups: State of a schedule that samples beside training: the groups that were begun and not
            trained on, and which is next. None: the synchronous schedule.
        checked_bytes: Size of the files that were compared; None for a checkpoint of release 0.1,
            which has no manifest.
    """

    step: int
    policy_directory: Path
    critic_directory: Path
    hf_directory: Path | None
    config_file: Path | None
    metrics: Mapping[str, float]
    checked_bytes: int | None
    groups: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The step with the greatest `value` of a metric among those with a checkpoint."""

    step: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestWhole:
    """The checkpoint to resume from.

    Attributes:
        checkpoint: None if the run has none.
        notes: Why it is not the one that `latest` names.
    """

    checkpoint: Checkpoint | None
    notes: tuple[str, ...]


class RunDirectory:
    """A run's directory, locked while it is used: `with RunDirectory(path) as directory:`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Makes and locks the directory.

        Raises:
            RunDirectoryError: It cannot be made, or another trainer uses it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunDirectoryError(f"run.dir={self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._lock, 20).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise RunDirectoryError(
                f"run.dir={self.path} is in use by another trainer (pid {owner}): wait for it, "
                "end it, or choose another directory"
            ) from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{os.getpid()}\n".encode())
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Frees the directory."""
        assert self._lock is not None
        os.close(self._lock)

    @property
    def holds_run(self) -> bool:
        """Whether a run has logged or saved a step here; before that, there is nothing to lose."""
        metrics = self.path / "metrics.jsonl"
        logged = metrics.exists() and metrics.stat().st_size > 0
        return logged or bool(Checkpoints(self.path / CHECKPOINTS, keep=1).steps())

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes the configuration of the run."""
        write_json(self.path / CONFIG, config)


def new_run_dir(name: str) -> Path:
    """Returns where a run without `run.dir` goes: ./runs/NAME-DATE-TIME."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path.cwd() / "runs" / f"{name}-{stamp}"


def read_config(path: Path) -> Mapping[str, Any]:
    """Returns the configuration in a run's file.

    Raises:
        DamageError: It is missing or damaged.
    """
    if not path.exists():
        raise DamageError(f"{path.name} is missing")
    return _json_object(path)


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """Reads and writes nothing yet.

        Args:
            directory: `checkpoints` of the run directory.
            keep: Number of checkpoints to keep.
        """
        self._directory = directory
        self._keep = keep
        self._last_good: Path | None = None
        self.saved_at = time.monotonic()
        """When the last checkpoint was complete, or this was made, in monotonic seconds."""

    @property
    def last_good(self) -> Path | None:
        """Directory of the checkpoint that was last resumed from or written here; None: none."""
        return self._last_good

    def newest_whole(self, *, contents: bool = True) -> NewestWhole:
        """Returns the checkpoint to resume from: that of `latest` if it is whole, else the newest.

        Args:
            contents: Whether to compare the contents of the files too, not only their sizes.

        Raises:
            RunDirectoryError: There are checkpoints, but none is whole.
        """
        steps, note = self._in_order()
        notes = [] if note is None else [note]
        for step in steps:
            try:
                checkpoint = _open(self._directory / _name(step), to="resume", contents=contents)
            except DamageError as error:
                notes.append(f"{self._directory / _name(step)} cannot be used: {error}")
            else:
                self._last_good = self._directory / _name(step)
                return NewestWhole(checkpoint=checkpoint, notes=tuple(notes))
        if steps:
            raise RunDirectoryError(
                f"{self._directory} holds no checkpoint to resume from: {'; '.join(notes)}. Put "
                "one back from a copy, or start a new run with another run.dir"
            )
        return NewestWhole(checkpoint=None, notes=tuple(notes))

    def latest(self) -> Checkpoint | None:
        """Returns the checkpoint that `latest` names, or else the newest; None if there is none.

        Its model was compared with the manifest; what only a resume reads was not. No other
        checkpoint is taken in its place: it would be another model.

        Raises:
            RunDirectoryError: It is damaged; the message names the newest that is whole.
        """
        steps, _ = self._in_order()
        return self.at(steps[0]) if steps else None

    def chosen(self) -> Checkpoint | None:
        """Returns the checkpoint that stands for the run: the best, or else `latest`.

        Raises:
            RunDirectoryError: It is damaged.
        """
        best = self.best
        return self.latest() if best is None else self.at(best.step)

    @property
    def best(self) -> Best | None:
        """The best checkpoint; None if the run does not choose one."""
        try:
            best = json.loads((self._directory / _BEST).read_text(encoding="utf-8"))
            return Best(step=int(best["step"]), value=float(best["value"]))
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def set_best(self, best: Best | None) -> None:
        """Makes it the best, which stays whatever else is removed; None: there is no best."""
        if best is None:
            (self._directory / _BEST).unlink(missing_ok=True)
        else:
            write_json(self._directory / _BEST, dataclasses.asdict(best))

    def choose_best(self, metric: str | None, *, until: int) -> None:
        """Makes the best that of the checkpoints up to a step; the first of equal ones.

        A run chooses so when it opens: what it chose before may be by another metric, of a step
        that it was set back from, or without the checkpoint that it had completed last.

        Args:
            metric: Metric whose greatest value is the best. None: no checkpoint is.
            until: The last step of the run so far.

        Raises:
            RunDirectoryError: A later release wrote one of them.
        """
        best: Best | None = None
        for step in self.steps():
            if metric is None or step > until:
                continue
            with contextlib.suppress(DamageError):
                directory = self._directory / _name(step)
                kept = _open(directory, to="read the model", contents=False)
                value = kept.metrics.get(metric)
                if value is not None and (best is None or value > best.value):
                    best = Best(step=step, value=value)
        self.set_best(best)

    def steps(self) -> tuple[int, ...]:
        """Returns the steps that have a checkpoint, whole or not, in order."""
        names = {path.name for path in self._directory.glob("step-*") if path.is_dir()}
        digits = (name.removeprefix("step-") for name in names)
        steps = sorted(int(number) for number in digits if number.isdecimal())
        return tuple(step for step in steps if _name(step) in names)

    def at(
        self,
        step: int,
        *,
        to: Literal["resume", "read the model"] = "read the model",
        contents: bool = True,
    ) -> Checkpoint:
        """Returns the checkpoint of a step; what is to be read was compared with the manifest.

        Args:
            contents: Whether to compare the contents of the files too, not only their sizes.

        Raises:
            RunDirectoryError: There is none, or it is damaged.
        """
        directory = self._directory / _name(step)
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise RunDirectoryError(
                f"{self._directory} has no checkpoint of step {step}; steps with a checkpoint: "
                f"{there}"
            )
        try:
            return _open(directory, to=to, contents=contents)
        except DamageError as error:
            raise RunDirectoryError(
                f"{directory} cannot be used: {error}. {self._whole_beside(step, to)}"
            ) from None

    def set_back(self, step: int) -> None:
        """Makes the checkpoint of a step the latest; those of later steps are written again."""
        self._point_to(_name(step))

    def _point_to(self, name: str) -> None:
        pointer = self._directory / f"{_LATEST}.partial"
        pointer.write_text(f"{name}\n", encoding="utf-8")
        pointer.replace(self._directory / _LATEST)
        self._last_good = self._directory / name

    def _whole_beside(self, step: int, to: Literal["resume", "read the model"]) -> str:
        for other in reversed(self.steps()):
            if other != step:
                with contextlib.suppress(DamageError):
                    _open(self._directory / _name(other), to=to)
                    return f"The newest whole one is {self._directory / _name(other)}"
        return "No other checkpoint of the run is whole"

    def _in_order(self) -> tuple[Sequence[int], str | None]:
        """Returns the steps in the order to try them, and what is wrong with `latest`."""
        newest_first = self.steps()[::-1]
        pointer = self._directory / _LATEST
        try:
            name = pointer.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return newest_first, f"{pointer} is missing" if newest_first else None
        except (OSError, ValueError) as error:
            return newest_first, f"{pointer} cannot be read: {error}"
        for step in newest_first:
            if _name(step) == name:
                return [step, *(other for other in newest_first if other != step)], None
        return newest_first, f"{pointer} names {name[:40]!r}, and there is no such checkpoint"

    async def save(
        self,
        step: int,
        metrics: Mapping[str, float],
        write: Callable[[Path], Awaitable[None]],
    ) -> None:
        """Writes the checkpoint of `step`, all of it at once, and makes it the latest.

        Raises:
            RunDirectoryError: See `write_model`.
        """
        await self.write_model(step, write)
        await self.complete(step, metrics)

    async def write_model(self, step: int, write: Callable[[Path], Awaitable[None]]) -> None:
        """Writes the model of a checkpoint, which exists when it is completed.

        Args:
            write: Writes `policy` below the given directory, and `hf` if the checkpoint is to
                hold the model as a Hugging Face directory. Both are read again for the manifest.

        Raises:
            RunDirectoryError: The disk is full or cannot be written; the previous checkpoint stays
                the latest.
        """
        with self._writing(step) as partial:
            self._remove_partial()
            if (self._directory / _name(step)).exists():  # from before the run was set back
                shutil.rmtree(self._directory / _name(step))
            partial.mkdir(parents=True)
            await write(partial)

    async def complete(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Mapping[str, object] | None = None,
    ) -> None:
        """Adds the rest to the model of a checkpoint, and makes it the latest.

        Raises:
            RunDirectoryError: See `write_model`.
        """
        name = _name(step)
        with self._writing(step) as partial:
            config = self._directory.parent / CONFIG
            if config.is_file():
                shutil.copyfile(config, partial / CONFIG)
            state: dict[str, object] = {"format": _FORMAT, "step": step, "metrics": dict(metrics)}
            if groups is not None:
                state["groups"] = dict(groups)
            write_json(partial / _STATE, state)
            await asyncio.to_thread(write_manifest, partial)
            partial.rename(self._directory / name)
            manifest = f"{self._directory.name}/{name}/{MANIFEST}"
            seal_file(self._directory.parent, step, manifest)
            self._remove_abandoned(name)
            self._point_to(name)
        self.saved_at = time.monotonic()
        self._remove_old(name)

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[Path]:
        """Gives the directory in which a checkpoint is built, and removes it after an error."""
        partial = self._directory / f"{_name(step)}.partial"
        try:
            yield partial
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RunDirectoryError(
                f"the checkpoint of step {step} cannot be written to {self._directory}: "
                f"{error.strerror or error}. Make room and start again with the same run.dir: the "
                "run resumes from the previous checkpoint"
            ) from error

    def _remove_partial(self) -> None:
        if self._directory.exists():
            for leftover in self._directory.glob("*.partial"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()

    def _remove_abandoned(self, newest: str) -> None:
        """Removes checkpoints that the run was set back from, and has now passed."""
        if (last := self._last_good) is not None:
            for step in self.steps():
                if last.name < _name(step) < newest:
                    shutil.rmtree(self._directory / _name(step))

    def _remove_old(self, newest: str) -> None:
        """Keeps `newest` and older ones; later ones are from before the run was set back."""
        complete = sorted(
            path for path in self._directory.glob("step-*") if path.is_dir() and path.name <= newest
        )
        best = self.best
        for path in complete[: -self._keep]:
            if best is None or path.name != _name(best.step):
                shutil.rmtree(path)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _open(
    directory: Path, *, to: Literal["resume", "read the model"], contents: bool = True
) -> Checkpoint:
    """Opens a checkpoint and checks what will be read of it.

    Raises:
        DamageError: It is not what was written.
        RunDirectoryError: A later release wrote it.
    """
    hf, config = directory / HF, directory / CONFIG
    has_hf = hf.is_dir()
    checked = None
    if (directory / MANIFEST).exists():
        tensors = {POLICY, CRITIC} if to == "resume" else {HF if has_hf else POLICY}
        checked = check_manifest(directory, parts={_STATE, CONFIG, *tensors}, contents=contents)
    state = _json_object(directory / _STATE)
    written = state.get("format")
    if isinstance(written, int) and written > _FORMAT:
        raise RunDirectoryError(
            f"{directory} has checkpoint format {written}, this release reads up to {_FORMAT}"
        )
    if checked is None and written != _WITHOUT_MANIFEST:
        raise DamageError(f"{MANIFEST} is missing")
    step, metrics = state.get("step"), state.get("metrics")
    if not isinstance(step, int) or not isinstance(metrics, dict):
        raise DamageError(f"{_STATE} holds no step and metrics")
    for name, value in metrics.items():
        if not _is_number(value):
            raise DamageError(f"{_STATE} is damaged: its metric {name[:40]!r} is not a number")
    if _name(step) != directory.name:
        raise DamageError(f"{_STATE} is of step {step}")
    groups = state.get("groups")
    if groups is not None and not _are_groups(groups):
        raise DamageError(f"{_STATE} is damaged: its groups are not numbers")
    return Checkpoint(
        step=step,
        policy_directory=directory / POLICY,
        critic_directory=directory / CRITIC,
        hf_directory=hf if has_hf else None,
        config_file=config if config.is_file() else None,
        metrics=metrics,
        checked_bytes=checked,
        groups=groups,
    )


def _are_groups(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("untrained"), list):
        return False
    return all(type(number) is int for number in (value.get("next"), *value["untrained"]))


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:  # JSON has integers that are no float.
        return False
    return True


def _json_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read: {error.strerror}") from None
    except (RecursionError, ValueError) as error:
        raise DamageError(f"{path.name} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise DamageError(f"{path.name} is damaged: it holds no JSON object")
    return value
