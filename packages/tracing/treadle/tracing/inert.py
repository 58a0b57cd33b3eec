"""Makes text that a model, a tool or a server wrote safe to show in a terminal and in a log.

Invariant: what is returned has no character that moves the cursor, changes colours, talks to the
terminal, is invisible, or reorders the characters around it; each is shown as its escape.
"""

import logging
import unicodedata
from typing import Final

__all__ = ["InertFormatter", "inert", "log_inertly"]

# Control (C0, C1), format (bidi, zero width), surrogate, private use; line and paragraph separator.
_HARMFUL: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def inert(text: str) -> str:
    r"""Returns the text with harmful characters as escapes; `\n` stays, a tab becomes spaces."""
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character == "\n":
        return character
    if character == "\t":
        return "    "
    if unicodedata.category(character) not in _HARMFUL:
        return character
    code = ord(character)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


class InertFormatter(logging.Formatter):
    """Formats log records as inert text, tracebacks included.

    Args:
        style: A format of `logging`; None: time, level, logger and message.
    """

    def __init__(self, style: str | None = None) -> None:
        super().__init__(style or "%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        return inert(super().format(record))


def log_inertly(level: str) -> None:
    """Sends the log of this process to standard error, as inert text."""
    handler = logging.StreamHandler()
    handler.setFormatter(InertFormatter())
    logging.basicConfig(level=level, handlers=[handler])
