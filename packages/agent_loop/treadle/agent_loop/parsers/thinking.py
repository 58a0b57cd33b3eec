"""The reasoning of a thinking model: what it writes before it answers, between two marks.

A template may have opened the reasoning at the end of the prompt; then the completion holds the
closing mark only. A completion that was cut while it thought is reasoning to its end.

Invariant: a call inside the reasoning is no call; the model has not decided on it yet.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    r"""How a family marks its reasoning.

    Attributes:
        open: The opening mark.
        close: The closing mark.
        lines: The template writes the marks on lines of their own (`<think>\n...\n</think>\n\n`),
            so that these line feeds are neither reasoning nor content.
    """

    open: str = "<think>"
    close: str = "</think>"
    lines: bool = False

    def split(self, text: str, *, prompt_end: str) -> tuple[str, int]:
        """Returns the reasoning, "" when there is none, and the place after it.

        Args:
            text: A decoded completion.
            prompt_end: As in `ToolCallParser.parse`.
        """
        start = self._start(text, prompt_end)
        if start < 0:
            closed = prompt_end.rstrip().endswith(self.close)
            return "", self._next_line(text, 0) if closed else 0
        close = text.find(self.close, start)
        reasoning = text[start:] if close < 0 else text[start:close]
        stop = len(text) if close < 0 else self._next_line(text, close + len(self.close))
        if self.lines:
            reasoning = reasoning.removeprefix("\n").removesuffix("\n")
        return reasoning, stop

    def write(self, reasoning: str) -> str:
        """Writes the reasoning the way the template does.

        Raises:
            ValueError: It holds the closing mark.
        """
        if self.close in reasoning:
            raise ValueError(f"reasoning cannot hold its own closing mark {self.close!r}")
        if self.lines:
            return f"{self.open}\n{reasoning}\n{self.close}\n\n"
        return f"{self.open}{reasoning}{self.close}"

    def _start(self, text: str, prompt_end: str) -> int:
        """Place of the reasoning's first character, or -1."""
        lead = len(text) - len(text.lstrip())
        if text.startswith(self.open, lead):
            return lead + len(self.open)
        if text.startswith(self.close, lead):  # how some templates write that there is none
            return lead
        if prompt_end.rstrip().endswith(self.open):
            return 0
        return 0 if not prompt_end and self.close in text else -1

    def _next_line(self, text: str, place: int) -> int:
        """Place after the line feeds that the template writes after the closing mark."""
        for _ in range(2 if self.lines else 0):
            place += text.startswith("\n", place)
        return place
