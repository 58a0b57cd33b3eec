"""The dataset: the rows of all files, in file order, checked when they are read.

Invariant: a `Row` has every required column with a value of the right shape, and the file and line
that it came from; its `index` counts the rows of all files from 0. A file is read once, at start,
into memory, or stays where it is (`rows_in_files`).

Which files there are is in `files`; `own_reader` reads those of another form. The columns are
verl's: `prompt` (a list of messages, see `messages`, or a text), `data_source` (str) and
`reward_model` (a mapping with `ground_truth`), which `completed` gives to rows without them,
optionally `agent_name`, `extra_info` and any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from treadle.tools.environments import is_environment
from treadle.trainer.data.errors import DataError, nearest
from treadle.trainer.data.files import find_files, is_function, read_file
from treadle.trainer.data.messages import read_message
from treadle.trainer.data.own_reader import Reader
from treadle.trainer.data.row import Row, completed
from treadle.trainer.data.row_problems import RowProblems
from treadle.trainer.data.rows_in_files import RowsInFiles
from treadle.trainer.hub import is_data_uri
from treadle.trainer.problems import Problems

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")


def read_rows(
    paths: Sequence[Path],
    *,
    required: Sequence[str] = REQUIRED_COLUMNS,
    limit: int | None = None,
    reader: Reader | None = None,
    in_files: bool = False,
) -> Sequence[Row]:
    """Reads the rows of all files, in order.

    Args:
        paths: Files and directories, here or on the Hub; see `files`.
        required: Columns that every row must have, with a value other than null. What the trainer
            reads has those of `REQUIRED_COLUMNS`; data as it is published has others.
        limit: Maximum number of rows, at least 1. None: read all.
        reader: Reads a path in place of `read_file`; a directory is then its own matter.
        in_files: Check every row, and keep none in memory; without `limit` and `reader`.

    Returns:
        At least one row.

    Raises:
        DataError: A file is missing, damaged, empty or of another type, or a row lacks a column or
            has a value of the wrong shape. The message names file, line and column.
        SeveralProblems: More than one of these.
    """
    rows: list[Row] = []
    files: list[Path] = []
    problems, of_rows = Problems(DataError), RowProblems("rows")
    for path in paths:
        with problems.collected():
            own = reader is not None and not is_data_uri(path)
            for file in (path,) if own else find_files(path):
                with problems.collected():
                    if in_files:
                        _check_file(file, required, of_rows)
                        files.append(file)
                    else:
                        _append(rows, file, required, limit, of_rows, reader or read_file)
    with problems.collected():
        of_rows.raise_if_any()
    problems.raise_if_any()
    return RowsInFiles(files) if in_files else tuple(rows)


def _check_file(file: Path, required: Sequence[str], found: RowProblems) -> None:
    if is_environment(file) or is_function(file):
        raise DataError(
            f"{file} makes its rows at start, and data.streaming=true leaves rows in files: set it "
            "to false"
        )
    empty = True
    for place, columns in read_file(file):
        empty = False
        for problem in problems_of(completed(columns, file), required):
            found.add(place, problem)
    if empty:
        raise DataError(f"{file} has no rows")


def _append(
    rows: list[Row],
    file: Path,
    required: Sequence[str],
    limit: int | None,
    found: RowProblems,
    read: Reader,
) -> None:
    """Appends the rows of one file, and to `found` what is wrong with them."""
    before = len(rows)
    if before == limit:
        return
    for place, columns in read(file):
        if required == REQUIRED_COLUMNS:
            columns = completed(columns, file)
        for problem in problems_of(columns, required):
            found.add(place, problem)
        exact = file.suffix == ".jsonl" or is_function(file)
        rows.append(Row(index=len(rows), place=place, columns=columns, exact=exact))
        if len(rows) == limit:
            return
    if len(rows) == before:
        raise DataError(f"{file} has no rows")


def problems_of(columns: Mapping[str, object], required: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with the columns of one row; see `read_rows`."""
    if missing := [column for column in required if columns.get(column) is None]:
        column, *others = missing
        what = "is null" if column in columns else "is missing"
        also = f", also {', '.join(map(repr, others))}" if others else ""
        yield (
            f"the column {column!r} {what}{nearest(column, columns)}{also}; "
            f"columns present: {', '.join(columns) or 'none'}"
        )
    if (prompt := columns.get("prompt")) is not None:
        yield from _problems_of_prompt(prompt)
    for place in _lone_surrogates(columns, ""):
        yield (
            f"{place} contains a lone surrogate, half of a character as \\ud83d, which no "
            "tokenizer reads: write the whole character, or remove it"
        )
    for column in ("reward_model", "extra_info"):
        value = columns.get(column)
        if value is not None and not isinstance(value, Mapping):
            yield f"{column} must be a mapping, got {value!r:.80}"
    name = columns.get("agent_name")
    if name is not None and not isinstance(name, str):
        yield f"agent_name must be a string, got {name!r:.80}"


def _problems_of_prompt(prompt: object) -> Iterator[str]:
    if not isinstance(prompt, list) or not prompt:
        yield f"prompt must be a list of messages, or a text, got {prompt!r:.80}"
        return
    for index, message in enumerate(prompt):
        try:
            # Whether arguments have a null that could be read two ways is told by `check_rows`.
            read_message(message, f"prompt[{index}]", exact=True, images=True)
        except ValueError as error:
            yield str(error)


def _lone_surrogates(value: object, where: str) -> Iterator[str]:
    """Yields where texts are that cannot be encoded."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            yield where
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _lone_surrogates(key, f"a key of {where or 'the row'}")
            yield from _lone_surrogates(entry, f"{where}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _lone_surrogates(entry, f"{where}[{index}]")
