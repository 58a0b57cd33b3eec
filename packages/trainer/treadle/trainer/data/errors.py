"""The error of invalid data, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """A file or row cannot be used. The message names the file, the row, the cause and the fix."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" if one of the `known` names is like `name`, else ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
