"""The state of a run: `status.json`, written by the trainer when the run begins and when it ends.

Invariant: "running" is written only by a trainer that holds the run directory's lock. So a run
that says it is running while the lock is free was killed.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

State = Literal["running", "finished", "failed", "interrupted", "killed", "unknown"]
STATUS = "status.json"
_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a run says about itself.

    Attributes:
        state: "killed" and "unknown" are never written: the trainer ended without a word, or it was
            of a version that wrote no state.
        error: Why it failed.
    """

    state: State
    error: str | None = None


def write_status(run_dir: Path, status: Status) -> None:
    """Writes the state, at once or not at all.

    Raises:
        OSError: It cannot be written.
    """
    partial = run_dir / f"{STATUS}.partial"
    text = json.dumps(asdict(status), indent=2)
    partial.write_text(f"{text}\n", encoding="utf-8", errors="replace")
    partial.replace(run_dir / STATUS)


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
        status = Status(state=state, error=problem)
    except (KeyError, RecursionError, TypeError, ValueError) as error:
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
