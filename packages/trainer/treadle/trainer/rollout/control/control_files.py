"""The requests of `treadle servers` and their answers, as files in `RUN/servers`.

Invariants: each file appears complete, by a rename. The driver claims a request by removing it, and
the sender withdraws it the same way, so that exactly one of them succeeds: a request is either
claimed by the driver, or reported to its sender as not carried out. Only the user who owns the run,
or root, can send one: the directory is theirs, and a file of another user is refused.
"""

import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = [
    "Answer",
    "ControlError",
    "Request",
    "ask",
    "make_directory",
    "read_list",
    "take_requests",
    "write_answer",
    "write_list",
]

_DIRECTORY = "servers"
_LIST = "list.json"
_POLL_S = 0.2
_MAX_BYTES = 1 << 16  # of a request, which has about 100
_NAME = re.compile(r"[!-~]{1,255}")

Action = Literal["add", "drain"]


class ControlError(RuntimeError):
    """The request was not carried out; the message names the cause, the value and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a run.

    Attributes:
        which: Its address; to drain, also its name.
        now: To drain: its sessions move.
    """

    action: Action
    which: str
    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of the driver.

    Attributes:
        state: accepted: another answer will follow.
        text: For the one who asked.
    """

    state: Literal["accepted", "done", "refused"]
    text: str


# --- the one who asks ----------------------------------------------------------------------------


def ask(
    run_dir: Path,
    request: Request,
    *,
    say: Callable[[str], None],
    wait: bool = True,
    claim_s: float = 15.0,
) -> str:
    """Sends a request and waits for its last answer, or with `wait=False` for the first.

    Earlier answers are passed to `say`.

    Args:
        claim_s: Seconds in which the driver must claim the request.

    Raises:
        ControlError: There is no such run, it does not run, or it refuses.
    """
    directory = _existing(run_dir)
    name = uuid.uuid4().hex
    asked, answered = directory / f"{name}.request", directory / f"{name}.answer"
    _write(asked, asdict(request))
    end = time.monotonic() + claim_s
    shown = ""
    try:
        while True:
            if answered.exists():
                answer = Answer(**json.loads(answered.read_text(encoding="utf-8")))
                if answer.state == "refused":
                    raise ControlError(answer.text)
                if answer.state == "done" or not wait:
                    return answer.text
                if answer.text != shown:
                    say(answer.text)
                    shown = answer.text
            elif time.monotonic() > end and _remove(asked):
                raise ControlError(
                    f"no trainer took the request within {claim_s:g} s: {run_dir} does not run "
                    "now (treadle servers list shows its last state)"
                )
            elif not (directory / _LIST).exists() and not answered.exists():
                _remove(asked)
                raise ControlError(f"the run of {run_dir} has ended, and with it the request")
            time.sleep(_POLL_S)
    finally:
        _remove(asked)
        if wait:
            _remove(answered)


def read_list(run_dir: Path) -> tuple[float, Sequence[Mapping[str, Any]]]:
    """Returns how many seconds ago the run wrote its servers, and the servers.

    Raises:
        ControlError: There is no such run, or it does not run.
    """
    found = json.loads((_existing(run_dir) / _LIST).read_text(encoding="utf-8"))
    return max(0.0, time.time() - found["at"]), found["servers"]


def _existing(run_dir: Path) -> Path:
    directory = run_dir / _DIRECTORY
    if not run_dir.is_dir():
        raise ControlError(f"--run-dir {run_dir} is not a directory: name the run.dir of a run")
    if not (directory / _LIST).exists():
        raise ControlError(
            f"--run-dir {run_dir} has no servers now: no run writes there, it has not connected "
            "its servers yet, or it has ended"
        )
    return directory


# --- the driver ----------------------------------------------------------------------------------


def make_directory(run_dir: Path) -> Path:
    """Makes the directory, for the present user only, without what an earlier run left."""
    directory = run_dir / _DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)
    for old in directory.iterdir():
        _remove(old)
    return directory


def take_requests(directory: Path) -> list[tuple[str, Request | Answer]]:
    """Claims the requests that wait; one of another user, or a damaged one, is its refusal."""
    taken: list[tuple[str, Request | Answer]] = []
    for path in sorted(directory.glob("*.request")):
        try:
            status = path.lstat()
            text = _read(path, status)
        except FileNotFoundError:  # it was withdrawn
            continue
        if not _remove(path):
            continue
        request: Request | Answer
        if status.st_uid not in (os.geteuid(), 0):
            refusal = f"user {status.st_uid} asked, and the run belongs to user {os.geteuid()}"
            request = Answer(state="refused", text=refusal)
        else:
            request = _parsed(text)
        taken.append((path.stem, request))
    return taken


def _read(path: Path, status: os.stat_result) -> bytes:
    """Returns a request's file; nothing of what is no file, such as a pipe that would block."""
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
        return b""
    try:
        return path.read_bytes()
    except PermissionError:
        return b""


def _parsed(text: bytes) -> Request | Answer:
    """Returns the request that bytes spell, or its refusal."""
    try:
        request = Request(**json.loads(text))
        if (
            request.action not in get_args(Action)
            or not isinstance(request.which, str)
            or _NAME.fullmatch(request.which) is None
            or not isinstance(request.now, bool)
        ):
            raise ValueError("action, which or now has another form")
    except (ValueError, TypeError, RecursionError) as error:
        cause = str(error)[:200]
        said = f"the request cannot be read ({cause}): use the run's release of treadle"
        return Answer(state="refused", text=said)
    return request


def write_answer(directory: Path, name: str, answer: Answer) -> None:
    """Answers a request; a later answer replaces an earlier one."""
    _write(directory / f"{name}.answer", asdict(answer))


def write_list(directory: Path, servers: Sequence[Mapping[str, Any]]) -> None:
    """Writes the list of the run's present servers."""
    _write(directory / _LIST, {"at": time.time(), "servers": servers})


def _write(path: Path, value: Mapping[str, Any]) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)


def _remove(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return False
    return True
