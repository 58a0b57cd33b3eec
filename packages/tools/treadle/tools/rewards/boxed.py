r"""The last `\boxed{...}` of a text, as MATH-like answers are marked. Pure functions."""

from __future__ import annotations

from typing import Final

_OPEN: Final = r"\boxed{"


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}`; None if there is none or it is not closed."""
    start = text.rfind(_OPEN)
    if start < 0:
        return None
    body = start + len(_OPEN)
    depth = 1
    for place in range(body, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[body:place]
    return None
