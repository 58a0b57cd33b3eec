"""Your own reader of data files: `data.reader`, a class or function that gives rows.

Invariant: what it raises or gives is an error that names it and the path, never a traceback; its
rows are checked as those of files are.

    class Rows:
        def __init__(self, path): self._path = path
        def __iter__(self): yield {"data_source": "mine", "prompt": [...], "reward_model": {}}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from treadle.agent_loop import SetupError, load_import_path
from treadle.trainer.data.errors import DataError

__all__ = ["Placed", "Reader", "imports_verl", "load_reader"]

Placed = tuple[str, Mapping[str, object]]
"""A row with its file and line."""

Reader = Callable[[Path], Iterator[Placed]]
"""From a path to its rows, each with its place."""

_IMPORT_OF_VERL: Final = re.compile(r"^\s*(?:from|import)\s+verl\b", re.MULTILINE)
_BUILT_IN: Final = (
    "a data set class of verl is not needed here. Leave data.custom_cls out: rows are read from "
    "files and directories, and `treadle data dapo_math` and `treadle data aime` write those that "
    "recipe/retool's CustomRLHFDataset makes"
)


def imports_verl(reference: str) -> bool:
    """Returns whether the file of "path.py:name" is code for verl, whatever else it imports."""
    try:
        text = Path(reference.rpartition(":")[0]).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return _IMPORT_OF_VERL.search(text) is not None


def load_reader(reference: str, *, with_path: bool = True) -> Reader:
    """Returns the reader that `reference` names.

    Args:
        reference: "path.py:name" or "package.module:name" of something that is called with a path
            and gives an iterable of mappings.
        with_path: Whether it is called with the path. Otherwise it makes its rows without one.

    Raises:
        SetupError: It does not load or cannot be called, or is code for verl.
    """
    try:
        made = load_import_path(reference, "reader")
    except SetupError as error:
        if imports_verl(reference):
            raise SetupError(f"{error}: {_BUILT_IN}") from error.__cause__
        raise
    if not callable(made):
        raise SetupError(f"the reader {reference!r} is {made!r:.80}, which cannot be called")

    def read(path: Path) -> Iterator[Placed]:
        try:
            rows = made(path) if with_path else made()
            if not isinstance(rows, Iterable) and not hasattr(rows, "__getitem__"):
                raise TypeError(f"it gives {rows!r:.80}, which is not an iterable of rows")
            for number, columns in enumerate(iter(rows), start=1):
                if not isinstance(columns, Mapping):
                    raise TypeError(f"row {number} is {columns!r:.80}; a row must be a mapping")
                yield f"{path}, row {number}", columns
        except Exception as error:
            raise DataError(
                f"the reader {reference} cannot read {path}: {type(error).__name__}: {error}"
            ) from error

    return read
