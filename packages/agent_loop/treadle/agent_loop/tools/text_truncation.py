"""Truncation of tool texts, by characters and by tokens.

A truncated text is a string again. The template renders it like any other, so the ids that enter
the transcript are the template's. They may be a few more than the limit where the cut and the
marker meet. Pure; nothing waits.
"""

import enum
from collections.abc import Sequence
from typing import Protocol, TypeVar

_REPLACEMENT = "\ufffd"
S = TypeVar("S", str, tuple[int, ...])


class TextCodec(Protocol):
    """Encodes plain text as ids and decodes ids, as every `ChatRenderer` does."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        ...


class TruncateSide(enum.StrEnum):
    """Which side of a long tool text is cut away, as in verl since PR #6313."""

    LEFT = "left"
    """Cut the left: keep the tail."""
    RIGHT = "right"
    """Cut the right: keep the head."""
    MIDDLE = "middle"
    """Cut the middle: keep half of the head and half of the tail."""


_MARKERS = {
    TruncateSide.LEFT: "(truncated)...",
    TruncateSide.RIGHT: "...(truncated)",
    TruncateSide.MIDDLE: "...(truncated)...",
}


def truncate_text(
    text: str,
    codec: TextCodec,
    *,
    max_chars: int | None,
    max_tokens: int | None,
    side: TruncateSide,
) -> str:
    """Truncates a text to its characters, then to its tokens, and marks the cut once.

    Args:
        codec: Counts the tokens; used only if `max_tokens` is set.
        max_chars: Maximum number of characters without the marker; None means no limit.
        max_tokens: Maximum number of tokens without the marker; None means no limit.
        side: Which side of the text is cut away.
    """
    head, tail, cut = _keep(text, max_chars, side)
    if max_tokens is not None:
        first, last = codec.encode(head), codec.encode(tail)
        if len(first) + len(last) > max_tokens:
            if cut and side is TruncateSide.MIDDLE:  # the middle is between them
                half = max_tokens // 2
                first, last = first[:half], last[len(last) - min(half, len(last)) :]
            else:
                first, last, cut = _keep(first + last, max_tokens, side)
            # A character that the cut went through decodes to the replacement character.
            head = codec.decode(first).rstrip(_REPLACEMENT)
            tail = codec.decode(last).lstrip(_REPLACEMENT)
    if not cut:
        return text
    return head + _MARKERS[side] + tail


def _keep(whole: S, limit: int | None, side: TruncateSide) -> tuple[S, S, bool]:
    """Returns what is kept before and after the cut, and whether there is a cut."""
    if limit is None or len(whole) <= limit:
        return whole, whole[:0], False
    match side:
        case TruncateSide.LEFT:
            return whole[:0], whole[-limit:], True
        case TruncateSide.RIGHT:
            return whole[:limit], whole[:0], True
        case TruncateSide.MIDDLE:
            half = limit // 2
            return whole[:half], whole[len(whole) - half :], True
