"""The common part of the commands: how they print and fail."""

import contextlib
import errno
import sys

__all__ = ["FULL_DISK", "exit_text", "fail", "say"]

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing that end when there is room."""


def say(text: str, *, error: bool = False) -> None:
    """Writes the text and a line end to standard output, or to standard error."""
    stream = sys.stderr if error else sys.stdout
    with contextlib.suppress(BrokenPipeError):
        stream.write(f"{text}\n")
        stream.flush()


def fail(error: Exception, *, status: int = 2) -> int:
    """Reports the error with its notes, and returns the status.

    Args:
        error: Its text names the cause, the value and the fix.
        status: 2, the user's input is wrong; 1, the work failed.
    """
    say("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), error=True)
    return status


def exit_text(exit_: SystemExit) -> str:
    """Returns which code ended the work: in a separate task, nothing catches an `exit()`."""
    from treadle.agent_loop import user_place

    place = user_place(exit_)
    at = "" if place is None else f" at {place}"
    return f"it was ended by exit({exit_.code!r}){at}: raise an error there instead"
