"""The reasoning of a thinking model: the text between two marks before its answer.

A template may open the reasoning at the end of the prompt; then the completion only has the closing
mark. A completion that was cut during the reasoning is all reasoning.

Invariant: a call inside the reasoning is not a call; the model has not decided on it yet.
`UnclosedReasoning` decides about a call at the end of a turn whose reasoning was never closed.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from treadle.agent_loop.parsers.base import without_partial


class UnclosedReasoning(enum.StrEnum):
    """The meaning of a complete call at the end of a turn whose reasoning was never closed."""

    CALL = "call"
    """It ends the reasoning and is made, as vLLM and SGLang do."""
    MALFORMED = "malformed"
    """It ends the reasoning and is a malformed call, which is counted and answered as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    r"""The marks of a family's reasoning.

    Attributes:
        lines: Whether the template writes the marks on separate lines
            (`<think>\n...\n</think>\n\n`), so that these line feeds are neither reasoning nor
            content.
        tight: Whether, with `lines`, the content stands right behind the closing mark.
    """

    open: str = "<think>"
    close: str = "</think>"
    lines: bool = False
    tight: bool = False

    def split(
        self, text: str, *, prompt_end: str, unclosed: Callable[[int], int]
    ) -> tuple[str, int, bool]:
        """Returns the reasoning, "" if there is none, the position after it, and if it is closed.

        Args:
            unclosed: Returns where a reasoning ends that begins at a position and is not closed.
        """
        start = self._start(text, prompt_end)
        if start < 0:
            closed = prompt_end.rstrip().endswith(self.close)
            return "", self._next_line(text, 0) if closed else 0, True
        end = text.find(self.close, start)
        if end < 0:
            stop = unclosed(start)
            return self._stripped(text[start:stop]), stop, False
        stop = self._next_line(text, end + len(self.close))
        return self._stripped(text[start:end]), stop, True

    def settled(
        self, text: str, *, prompt_end: str, marks: tuple[str, ...]
    ) -> tuple[str, int | None]:
        """Returns the reasoning that is certain, and the position after all of it.

        The position is None as long as the reasoning may continue.

        Args:
            text: The beginning of a decoded completion.
            marks: The beginnings of a call, which may end the reasoning.
        """
        lead = text.lstrip()
        if any(mark.startswith(lead) for mark in (self.open, self.close)):
            return "", None
        start = self._start(text, prompt_end)
        if start < 0 and not prompt_end:
            return "", None
        if start < 0 or text.find(self.close, start) >= 0:
            reasoning, stop, _ = self.split(text, prompt_end=prompt_end, unclosed=int)
            return reasoning, stop
        found = [at for mark in marks if (at := text.find(mark, start)) >= 0]
        rest = text[start : min(found)] if found else text[start:]
        return self._stripped(rest if found else without_partial(rest, self.close, *marks)), None

    def write(self, reasoning: str) -> str:
        """Writes the reasoning as the template does.

        Raises:
            ValueError: The reasoning contains the closing mark.
        """
        if self.close in reasoning:
            raise ValueError(f"reasoning cannot contain its own closing mark {self.close!r}")
        if self.lines:
            return f"{self.open}\n{reasoning}\n{self.close}" + ("" if self.tight else "\n\n")
        return f"{self.open}{reasoning}{self.close}"

    def _start(self, text: str, prompt_end: str) -> int:
        """Returns the position of the reasoning's first character, or -1."""
        lead = len(text) - len(text.lstrip())
        if text.startswith(self.open, lead):
            return lead + len(self.open)
        if text.startswith(self.close, lead):  # some templates mark empty reasoning so
            return lead
        if prompt_end.rstrip().endswith(self.open):
            return 0
        return 0 if not prompt_end and self.close in text else -1

    def _stripped(self, reasoning: str) -> str:
        if self.lines:
            return reasoning.removeprefix("\n").removesuffix("\n")
        return reasoning

    def _next_line(self, text: str, place: int) -> int:
        """Returns the position after the line feeds that follow the closing mark."""
        for _ in range(2 if self.lines and not self.tight else 0):
            place += text.startswith("\n", place)
        return place
