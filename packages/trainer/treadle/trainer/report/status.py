"""The state of a run: `status.json`, written by the trainer at its begin, its end and each step.

Invariants:

1. "running" is written only by a trainer that holds the run directory's lock. So a run whose state
   is "running" while the lock is free was killed.
2. A reader finds a complete state, the previous or the new one. The end of a run is written even if
   the disk is full: the new state takes the space of the previous one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from treadle.trainer.report.pace import Expected

State = Literal["running", "finished", "failed", "interrupted", "killed", "unknown"]
STATUS = "status.json"
_LOCK = "lock"
_CUT = " ..."
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a run, as `status.json` has it.

    Attributes:
        state: "killed" and "unknown" are never written: the trainer ended without a word, or it was
            of a version that wrote no state.
        step: While it runs, the last step that has ended; None before.
        step_s: Then the seconds that a step is expected to take, without validation and checkpoint.
        ends_at: Then when the run is expected to end, as ISO 8601 in UTC.
        busy: Then the share of the last step in which each server and policy rank worked, by name;
            None: not known.
    """

    state: State
    error: str | None = None
    step: int | None = None
    step_s: float | None = None
    ends_at: str | None = None
    busy: Mapping[str, float] | None = None


def running(
    step: int, expected: Expected | None, busy: Mapping[str, float] | None = None
) -> Status:
    """Returns the state of a run after a step, now."""
    if busy is not None:
        busy = {name: round(share, 4) for name, share in sorted(busy.items())}
    if expected is None:
        return Status(state="running", step=step, busy=busy)
    ends_at = datetime.now(UTC) + timedelta(seconds=expected.left_s)
    return Status(
        state="running",
        step=step,
        step_s=round(expected.step_s, 3),
        ends_at=ends_at.isoformat(timespec="seconds"),
        busy=busy,
    )


def write_status(run_dir: Path, status: Status) -> None:
    """Writes the state, at once or not at all; on a full disk, over the one before.

    Raises:
        OSError: It cannot be written.
    """
    path, partial = run_dir / STATUS, run_dir / f"{STATUS}.partial"
    try:
        partial.write_bytes(_encoded(status))
        partial.replace(path)
    except OSError as error:
        if error.errno not in _NO_ROOM or not _overwritten(path, status):
            raise
    finally:  # a full disk must not keep half of it
        partial.unlink(missing_ok=True)


def _encoded(status: Status) -> bytes:
    return f"{json.dumps(asdict(status), indent=2)}\n".encode(errors="replace")


def _overwritten(path: Path, status: Status) -> bool:
    """Writes the state into the room that the file has already; returns whether it fits.

    An error that is too long for it is cut.
    """
    if not path.exists():
        return False
    with path.open("r+b", buffering=0) as file:
        before = os.fstat(file.fileno())
        room = max(before.st_size, 512 * before.st_blocks)
        data, error = _encoded(status), status.error
        while len(data) > room and error:
            error = error[: max(0, len(error) * room // len(data) - len(_CUT))]
            data = _encoded(replace(status, error=error + _CUT))
        if len(data) > room:
            return False
        file.write(data.ljust(before.st_size))  # in one piece: what follows the state is blank
    return True


def read_status(run_dir: Path) -> Status:
    """Returns the state of a run.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged; the text names it.
    """
    path = run_dir / STATUS
    if not path.exists():
        return Status(state="unknown")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        state, problem = values["state"], values["error"]
        if state not in get_args(State) or not isinstance(problem, str | None):
            raise ValueError(f"there is no such state: {state!r:.80}")
        step, step_s, ends_at = map(values.get, ("step", "step_s", "ends_at"))
        if not isinstance(step, int | None) or not isinstance(step_s, float | None):
            raise ValueError(f"step {step!r:.80} of {step_s!r:.80} s is not a step")
        if ends_at is not None:
            datetime.fromisoformat(ends_at)
        busy = values.get("busy")
        if busy is not None and not all(isinstance(share, float) for share in busy.values()):
            raise ValueError(f"these are not shares: {busy!r:.80}")
        status = Status(
            state=state, error=problem, step=step, step_s=step_s, ends_at=ends_at, busy=busy
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if status.state == "running" and not _is_locked(run_dir / _LOCK):
        return replace(status, state="killed")
    return status


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
