"""The files of a data set: where they are, and their rows in order.

A path is a file, several files by a `*` in the name, a directory, or files on the Hugging Face Hub.
A file is `.jsonl` (one JSON object per line, blank lines skipped), `.parquet` or `.arrow` (stream
or file format). A directory holds such files at any depth, or is one that `save_to_disk` of the
library `datasets` wrote. An environment, "LIBRARY:NAME" or a `.yaml` file, makes its rows itself
(`treadle.tools.environments`), and so does a function without parameters, "path.py:function".

Invariant: which files a directory stands for is never a guess: one with several splits or several
formats is an error that lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from treadle.agent_loop import SetupError
from treadle.tools.environments import is_environment, read_rows
from treadle.trainer.data.errors import DataError
from treadle.trainer.data.own_reader import Placed, load_reader
from treadle.trainer.hub import HubError, download_data, is_data_uri

if TYPE_CHECKING:
    import pyarrow

__all__ = ["arrow_batches", "find_files", "is_function", "parse_line", "read_file"]

_SUFFIXES: Final = (".jsonl", ".parquet", ".arrow")
_SPLIT: Final = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev)(?=$|[-_.])")
_ARROW_FILE: Final = b"ARROW1"


def find_files(path: Path) -> Sequence[Path]:
    """Returns the files that a path of the configuration stands for, in order.

    Raises:
        DataError: There is none, or it is not clear which.
    """
    if is_data_uri(path):
        try:
            return download_data(path)
        except HubError as error:
            raise DataError(str(error)) from None
    if is_environment(path) or is_function(path):
        return (path,)
    if path.is_dir():
        return _of_directory(path)
    if "*" in path.name and not path.exists():
        files = sorted(file for file in path.parent.glob(path.name) if file.is_file())
        if not files:
            raise DataError(f"{path}: {path.parent} has no such file")
        return files
    return (path,)


def read_file(path: Path) -> Iterator[Placed]:
    """Yields the rows of one file or environment, each with its place.

    Raises:
        DataError: It is missing, damaged or of another type, or an environment that cannot be made.
    """
    if is_environment(path):
        return _of_environment(path)
    if is_function(path):
        return load_reader(str(path), with_path=False)(path)
    if not path.exists():
        raise DataError(f"{path} does not exist{_how_to_make(path)}")
    match path.suffix:
        case ".jsonl":
            reader = _read_jsonl
        case ".parquet":
            reader = _read_parquet
        case ".arrow":
            reader = _read_arrow
        case _:
            raise DataError(
                f"{path}: datasets are .jsonl, .parquet or .arrow files, directories of them, "
                "functions (path.py:function) or environments (docs/environments.md), got "
                f"{path.suffix!r}"
            )
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    return reader(path)


def is_function(path: Path) -> bool:
    """Returns whether a path is "path.py:function", which gives rows."""
    return ".py:" in path.name and not is_environment(path)


def _of_environment(path: Path) -> Iterator[Placed]:
    try:
        yield from read_rows(path)
    except SetupError as error:
        raise DataError(str(error)) from error


def _of_directory(path: Path) -> Sequence[Path]:
    if (saved := path / "state.json").is_file():
        return _saved_by_datasets(saved)
    if (splits := path / "dataset_dict.json").is_file():
        names = sorted(file.parent.name for file in path.glob("*/state.json"))
        raise DataError(
            f"{splits.parent} holds the splits {', '.join(names) or 'none'}: name one, as "
            f"{path / (names[0] if names else 'train')}"
        )
    inside = ((file, file.relative_to(path)) for file in path.rglob("*"))
    files = sorted(
        file
        for file, name in inside
        if file.suffix in _SUFFIXES
        and file.is_file()
        and not any(part.startswith((".", "cache-")) for part in name.parts)
    )
    if not files:
        raise DataError(f"{path} holds no {', '.join(_SUFFIXES)} file")
    for what, kinds in (
        ("formats", {file.suffix for file in files}),
        ("splits", {split for f in files if (split := _split_of(f.relative_to(path)))}),
    ):
        if len(kinds) > 1:
            shown = ", ".join(str(file.relative_to(path)) for file in files[:6])
            raise DataError(
                f"{path} holds files of several {what} ({', '.join(sorted(kinds))}): {shown}. Name "
                f"the files that are meant; a * stands for any characters, as in train-*.parquet"
            )
    return files


def _split_of(name: Path) -> str | None:
    """Returns the split that a file's name, else one of its folders, contains; None: no split."""
    for part in (name.stem, *reversed(name.parts[:-1])):
        if (found := _SPLIT.search(part)) is not None:
            return found[1]
    return None


def _saved_by_datasets(state: Path) -> Sequence[Path]:
    try:
        listed = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        return [state.parent / str(entry["filename"]) for entry in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{state} does not list the files of a saved data set: {error!r}") from None


def _how_to_make(path: Path) -> str:
    """Returns a hint at the script of the example that the file belongs to, or nothing."""
    for directory in path.parents[:2]:
        script = directory / "preprocess.py"
        if script.is_file():
            # The modules of an example import each other by the name of its folder.
            python = f"PYTHONPATH={directory.parent} python"
            return f": run `{python} {script} --output {path.parent}` first"
    return ""


def _read_jsonl(path: Path) -> Iterator[Placed]:
    with path.open("rb") as file:  # binary: json decodes it, so that a bad byte has a line number
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield parse_line(path, number, line)


def parse_line(path: Path, number: int, line: bytes) -> Placed:
    """Returns the row of one line of a `.jsonl` file.

    Raises:
        DataError: It is not a JSON object.
    """
    place = f"{path}, line {number}"
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: a row must be a JSON object, got {type(value).__name__}")
    return place, value


def _read_parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from _rows(path, file.iter_batches())
    except (pyarrow.ArrowException, OSError) as error:  # OSError: a damaged page or footer
        raise DataError(f"{path} is not a parquet file that can be read: {error}") from error


def _read_arrow(path: Path) -> Iterator[Placed]:
    import pyarrow

    try:
        yield from _rows(path, arrow_batches(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not an Arrow file that can be read: {error}") from error


def arrow_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """Yields the batches of an `.arrow` file, which stays where it is: it is mapped into memory."""
    import pyarrow
    from pyarrow import ipc

    source = pyarrow.memory_map(str(path))
    with path.open("rb") as file:
        is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    if is_file:
        whole = ipc.open_file(source)
        yield from (whole.get_batch(number) for number in range(whole.num_record_batches))
    else:
        yield from ipc.open_stream(source)


def _rows(path: Path, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Placed]:
    number = 0
    for batch in batches:
        for columns in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", columns
