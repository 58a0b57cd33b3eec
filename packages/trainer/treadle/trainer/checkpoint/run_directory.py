"""The run directory's state: its checkpoints, its configuration and its lock.

Invariant: `checkpoints/latest` names a complete checkpoint or does not exist. A checkpoint is
written under a `.partial` name, then renamed, then named in `latest`, each step atomic. What a
killed trainer leaves behind is removed by the next. One trainer uses a run directory at a time:
it holds a lock on `lock`, which the operating system frees when the trainer dies.

Besides the policy a checkpoint needs only the step: data order and seeds are functions of it. It
also carries the step's metrics, in case the trainer dies before they are logged.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = [
    "CHECKPOINTS",
    "HF",
    "POLICY",
    "Checkpoint",
    "Checkpoints",
    "RunDirectory",
    "RunDirectoryError",
    "write_json",
]

_FORMAT = 1
CHECKPOINTS = "checkpoints"
"""Folder of a run directory that holds its checkpoints."""
POLICY = "policy"
"""Folder of a checkpoint that holds the policy's tensors and optimizer state."""
HF = "hf"
"""Folder of a checkpoint that holds the model as a Hugging Face directory."""


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used or written; the message names it, the cause and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: Number of steps trained.
        policy_directory: The policy's tensors.
        hf_directory: The model as a Hugging Face directory; None if the checkpoint has none.
        metrics: The metrics of `step`.
    """

    step: int
    policy_directory: Path
    hf_directory: Path | None
    metrics: Mapping[str, float]


def write_json(path: Path, value: Any) -> None:
    """Writes a file atomically: it is complete or absent."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class RunDirectory:
    """A run's directory, locked while it is used: `with RunDirectory(path) as directory:`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Makes and locks the directory.

        Raises:
            RunDirectoryError: it cannot be made, or another trainer uses it.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Frees the directory."""
        assert self._lock is not None
        os.close(self._lock)

    @property
    def holds_run(self) -> bool:
        """Whether a run has logged a step here; before that, there is nothing to lose."""
        metrics = self.path / "metrics.jsonl"
        begun = metrics.exists() and metrics.stat().st_size > 0
        return begun and (self.path / "config.json").exists()

    def read_config(self) -> Mapping[str, Any]:
        """Returns the configuration of the run that began here."""
        value = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        assert isinstance(value, dict)
        return value

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes the configuration of the run."""
        write_json(self.path / "config.json", config)


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

    def latest(self) -> Checkpoint | None:
        """Returns the latest complete checkpoint, or None.

        Raises:
            RunDirectoryError: `latest` names one that cannot be read.
        """
        pointer = self._directory / "latest"
        if not pointer.exists():
            return None
        directory = self._directory / pointer.read_text(encoding="utf-8").strip()
        try:
            return _read(directory)
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{pointer} names {directory}, which cannot be read: {error}. Write the name of "
                "another checkpoint into it, or start a new run with another run.dir"
            ) from None

    def steps(self) -> tuple[int, ...]:
        """Returns the steps that have a checkpoint, in order."""
        names = (path.name for path in self._directory.glob("step-*") if path.is_dir())
        digits = (name.removeprefix("step-") for name in names)
        return tuple(sorted(int(number) for number in digits if number.isdecimal()))

    def at(self, step: int) -> Checkpoint:
        """Returns the checkpoint of a step.

        Raises:
            RunDirectoryError: There is none, or it cannot be read.
        """
        try:
            return _read(self._directory / _name(step))
        except (OSError, ValueError) as error:
            there = ", ".join(map(str, self.steps())) or "none"
            raise RunDirectoryError(
                f"{self._directory} has no checkpoint of step {step} that can be read ({error}); "
                f"steps with a checkpoint: {there}"
            ) from None

    async def save(
        self,
        step: int,
        metrics: Mapping[str, float],
        write: Callable[[Path], Awaitable[None]],
    ) -> None:
        """Writes the checkpoint of `step` and makes it the latest.

        Args:
            step: Number of steps trained.
            metrics: The metrics of `step`.
            write: Writes `policy` below the given directory, and `hf` if the checkpoint is to
                hold the model as a Hugging Face directory.

        Raises:
            RunDirectoryError: the disk is full or cannot be written; the previous checkpoint stays
                the latest.
        """
        name = _name(step)
        partial = self._directory / f"{name}.partial"
        try:
            self._remove_partial()
            if (self._directory / name).exists():  # from before the run was set back
                shutil.rmtree(self._directory / name)
            partial.mkdir(parents=True)
            await write(partial)
            write_json(
                partial / "state.json", {"format": _FORMAT, "step": step, "metrics": dict(metrics)}
            )
            partial.rename(self._directory / name)
            pointer = self._directory / "latest.partial"
            pointer.write_text(f"{name}\n", encoding="utf-8")
            pointer.replace(self._directory / "latest")
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RunDirectoryError(
                f"the checkpoint of step {step} cannot be written to {self._directory}: "
                f"{error.strerror or error}. Make room and start again with the same run.dir: the "
                "run resumes from the previous checkpoint"
            ) from error
        self._remove_old(name)

    def _remove_partial(self) -> None:
        if self._directory.exists():
            for leftover in self._directory.glob("*.partial"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()

    def _remove_old(self, newest: str) -> None:
        """Keeps `newest` and older ones; later ones are from before the run was set back."""
        complete = sorted(
            path for path in self._directory.glob("step-*") if path.is_dir() and path.name <= newest
        )
        for path in complete[: -self._keep]:
            shutil.rmtree(path)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _read(directory: Path) -> Checkpoint:
    """Reads a checkpoint's state.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not JSON.
        RunDirectoryError: Another release wrote it.
    """
    state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    if state["format"] != _FORMAT:
        raise RunDirectoryError(
            f"{directory} has checkpoint format {state['format']}, this release reads {_FORMAT}"
        )
    hf = directory / HF
    return Checkpoint(
        step=state["step"],
        policy_directory=directory / POLICY,
        hf_directory=hf if hf.is_dir() else None,
        metrics=state["metrics"],
    )
