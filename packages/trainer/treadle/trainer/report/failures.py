"""Failed trajectories: what is said of them at once, and what is kept.

A kind of failure is one type of error, one type of cause and one place in the user's code. The
first of each kind is shown with the line of code, and its whole traceback goes to the log.
"""

import traceback
from collections.abc import Iterable, Iterator, Sequence

from treadle.agent_loop import Trajectory, user_frame, user_place

__all__ = ["FirstFailures", "causes", "whole_traceback"]

_MAX_SHOWN = 20


def causes(trajectories: Iterable[Trajectory]) -> Iterator[str]:
    """Yields `3 x GenerationTimeoutError, as: ...` for those that failed, most frequent first."""
    by_kind: dict[str, list[str]] = {}
    for trajectory in trajectories:
        if (error := trajectory.error) is not None:
            by_kind.setdefault(type(error).__name__, []).append(str(error))
    for kind, texts in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        yield f"{len(texts)} x {kind}, as: {texts[0]}"


def whole_traceback(error: BaseException) -> str:
    """Returns the traceback of an error and of its causes, as Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip("\n")


class FirstFailures:
    """Remembers the kinds of failures of a run; at most 20 of them are shown."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str | None]] = set()

    def take(self, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, str]]:
        """Returns the first trajectory of each new kind, with its text for the console.

        Returns:
            The text is the line of the user's code, `File "...", line ..., in ...`, or "" where
            none was running.
        """
        new: list[tuple[Trajectory, str]] = []
        for trajectory in trajectories:
            error = trajectory.error
            if error is None:
                continue
            cause = type(error.__cause__).__name__
            kind = (type(error).__name__, cause, user_place(error))
            if kind in self._seen or len(self._seen) >= _MAX_SHOWN:
                continue
            self._seen.add(kind)
            frame = user_frame(error)
            shown = "" if frame is None else "".join(traceback.format_list([frame])).rstrip("\n")
            new.append((trajectory, shown))
        return new
