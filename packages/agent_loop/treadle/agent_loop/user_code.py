"""Where in the user's code an error was raised, or a thread is: what a user needs first.

The user's code is every frame outside Treadle's packages, the standard library and installed
packages: their reward, tool or loop, whatever it called.
"""

import re
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

__all__ = ["RemoteError", "dumped_place", "running_place", "user_frame", "user_place"]


class RemoteError(Exception):
    """An error in another process, as the cause of one here; its text is the traceback there."""

    def __init__(self, text: str, frame: traceback.FrameSummary | None) -> None:
        super().__init__(text)
        self.frame = frame


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame of the user's code; None if the error crossed none.

    Args:
        error: Its causes are searched first, since the innermost one was raised first.
    """
    for each in reversed(causes(error)):
        if isinstance(each, RemoteError):
            return each.frame
        theirs = [
            (frame, line)
            for frame, line in traceback.walk_tb(each.__traceback__)
            if _is_users(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))
        ]
        if theirs:
            return traceback.StackSummary.extract(theirs)[-1]
    return None


def user_place(error: BaseException) -> str | None:
    """Returns `FILE:LINE, in FUNCTION` of `user_frame`; the file as a path that can be opened."""
    frame = user_frame(error)
    return None if frame is None else _place(frame)


def running_place(frame: FrameType) -> str:
    """Returns `FILE:LINE, in FUNCTION` of the innermost frame of the user's code that runs.

    Args:
        frame: The innermost frame of a thread; returned itself if none is the user's.
    """
    stack = list(traceback.walk_stack(frame))
    theirs = [
        (each, line)
        for each, line in stack
        if _is_users(each.f_code.co_filename, each.f_globals.get("__name__", ""))
    ]
    return _place(traceback.StackSummary.extract(theirs[:1] or stack[:1])[0])


def dumped_place(text: str) -> str | None:
    """Returns the same from what `faulthandler` wrote of a thread; None if it wrote no frame."""
    frames = [
        traceback.FrameSummary(file, int(line), name)
        for file, line, name in re.findall(r'^  File "(.+)", line (\d+) in (.+)$', text, re.M)
    ]
    theirs = [frame for frame in frames if _is_users(frame.filename, "")]
    return _place((theirs or frames)[0]) if frames else None


def _place(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename)
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{shown}:{frame.lineno}, in {frame.name}"


def causes(error: BaseException) -> list[BaseException]:
    """Returns the error, its cause, the cause of that, and so on."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__
    return chain


def _is_users(file: str, module: str) -> bool:
    if module.split(".")[0] == "treadle" or file.startswith("<"):
        return False
    return not file.startswith(_installed())


@cache
def _installed() -> tuple[str, ...]:
    # When it is first asked: sysconfig loads another module, which an import should not pay.
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
