"""Failed trajectories, grouped by kind: the first of each kind is shown at once.

Failures of one kind have the same type of error, type of cause and place in the user's code;
without a place, the same text apart from values. The first is shown with the line of code, and its
whole traceback goes to the log.
"""

import re
import traceback
from collections.abc import Iterable, Iterator, Sequence

from treadle.agent_loop import (
    AgentLoopError,
    LoopError,
    RewardError,
    RolloutError,
    Trajectory,
    user_frame,
    user_place,
)

__all__ = ["FirstFailures", "causes", "of_own_code", "whole_traceback"]

_MAX_SHOWN = 20
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![\w.])-?\d[\w.+-]*")
_MAY_SERVE = re.compile(
    r"^\s*[\w.]*(?:OS|Timeout|Connection\w*|Generation\w*|Overloaded|Unavailable)Error\b", re.M
)
Kind = tuple[str, str, str]


def causes(trajectories: Iterable[Trajectory]) -> Iterator[str]:
    """Yields `3 x GenerationTimeoutError, as: ...` for each kind, most frequent first."""
    by_kind: dict[Kind, list[AgentLoopError]] = {}
    for trajectory in trajectories:
        if (error := trajectory.error) is not None:
            by_kind.setdefault(_kind(error), []).append(error)
    found = sorted(by_kind.values(), key=lambda errors: -len(errors))
    for errors in found[:_MAX_SHOWN]:
        yield f"{len(errors)} x {type(errors[0]).__name__}, as: {errors[0]}"
    if rest := found[_MAX_SHOWN:]:
        yield f"{sum(map(len, rest))} of {len(rest)} other kinds"


def of_own_code(error: AgentLoopError | None) -> bool:
    """Returns whether an error is a bug of the user's reward or loop, which comes again.

    Something that cannot be reached or takes too long may serve the next time.
    """
    if not isinstance(error, LoopError | RewardError):
        return False
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is error:
        return True
    # A loop worker sends the traceback as text.
    return not isinstance(cause, OSError | RolloutError) and not _MAY_SERVE.search(str(cause))


def _kind(error: BaseException) -> Kind:
    place = user_place(error)
    text = _VALUES.sub("", str(error)) if place is None else place
    return type(error).__name__, type(error.__cause__).__name__, text


def whole_traceback(error: BaseException) -> str:
    """Returns the traceback of an error and of its causes, as Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip("\n")


class FirstFailures:
    """Remembers the kinds of failures of a run; at most 20 of them are shown."""

    def __init__(self) -> None:
        self._seen: set[Kind] = set()

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
            kind = _kind(error)
            if kind in self._seen or len(self._seen) >= _MAX_SHOWN:
                continue
            self._seen.add(kind)
            frame = user_frame(error)
            shown = "" if frame is None else "".join(traceback.format_list([frame])).rstrip("\n")
            new.append((trajectory, shown))
        return new
