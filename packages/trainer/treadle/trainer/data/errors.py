"""What is wrong with the data, said so that it can be found and mended."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """A file or row cannot be used. The text names the file, the row, the cause and the fix."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The text " (did you mean 'x'?)" if one of the `known` names is like `name`, else ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
