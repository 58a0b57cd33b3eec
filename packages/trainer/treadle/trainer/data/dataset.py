"""The dataset: the rows of all files, in file order, checked when they are read.

Invariant: a `Row` has every required column with a value of the right shape, and the file and line
that it came from; its `index` counts the rows of all files from 0. A file is read once, at start,
into memory.

Files are `.jsonl` (one JSON object per line, blank lines skipped) or `.parquet`. The columns are
verl's: `data_source` (str), `prompt` (a list of {"role", "content"}), `reward_model` (a mapping
with `ground_truth`), optionally `agent_name`, `extra_info` and any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.trainer.data.errors import DataError, nearest
from treadle.trainer.data.row_problems import RowProblems
from treadle.trainer.hub import HubError, download_data, is_data_uri
from treadle.trainer.problems import Problems

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. `place` names its file and line for messages, such as "train.jsonl, line 12"."""

    index: int
    place: str
    columns: Mapping[str, object]


def read_rows(
    paths: Sequence[Path],
    *,
    required: Sequence[str] = REQUIRED_COLUMNS,
    limit: int | None = None,
) -> tuple[Row, ...]:
    """Reads the rows of all files, in order.

    Args:
        paths: `.jsonl` and `.parquet` files, here or on the Hub (hf://datasets/ORG/NAME/PATH).
        required: Columns that every row must have, with a value other than null. What the trainer
            reads has those of `REQUIRED_COLUMNS`; data as it is published has others.
        limit: Maximum number of rows, at least 1. None: read all.

    Returns:
        At least one row.

    Raises:
        DataError: A file is missing, damaged, empty or of another type, or a row lacks a column or
            has a value of the wrong shape. The message names file, line and column.
        SeveralProblems: More than one of these.
    """
    rows: list[Row] = []
    problems, of_rows = Problems(DataError), RowProblems("rows")
    for path in paths:
        with problems.collected():
            for file in _local(path):
                with problems.collected():
                    _append(rows, file, required, limit, of_rows)
    with problems.collected():
        of_rows.raise_if_any()
    problems.raise_if_any()
    return tuple(rows)


def _append(
    rows: list[Row], file: Path, required: Sequence[str], limit: int | None, found: RowProblems
) -> None:
    """Appends the rows of one file, and to `found` what is wrong with them."""
    before = len(rows)
    if before == limit:
        return
    for place, columns in _read(file):
        for problem in _problems_of(columns, required):
            found.add(place, problem)
        rows.append(Row(index=len(rows), place=place, columns=columns))
        if len(rows) == limit:
            return
    if len(rows) == before:
        raise DataError(f"{file} has no rows")


def _local(path: Path) -> Sequence[Path]:
    """Returns the file, or the files on the Hub from its cache."""
    if not is_data_uri(path):
        return (path,)
    try:
        return download_data(path)
    except HubError as error:
        raise DataError(str(error)) from None


def _read(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    match path.suffix:
        case ".jsonl":
            reader = _read_jsonl
        case ".parquet":
            reader = _read_parquet
        case _:
            raise DataError(f"{path}: datasets are .jsonl or .parquet files, got {path.suffix!r}")
    if not path.is_file():
        raise DataError(f"{path} does not exist{_how_to_make(path)}")
    return reader(path)


def _how_to_make(path: Path) -> str:
    """Returns a hint at the script of the example that the file belongs to, or nothing."""
    for directory in path.parents[:2]:
        script = directory / "preprocess.py"
        if script.is_file():
            return f": run `python {script} --output {path.parent}` first"
    return ""


def _read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    with path.open("rb") as file:  # binary: json decodes it, so that a bad byte has a line number
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(f"{place}: not a JSON object: {error}") from error
            if not isinstance(value, dict):
                raise DataError(f"{place}: a row must be a JSON object, got {type(value).__name__}")
            yield place, value


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for columns in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", columns
    except (pyarrow.ArrowException, OSError) as error:  # OSError: a damaged page or footer
        raise DataError(f"{path} is not a parquet file that can be read: {error}") from error


def _problems_of(columns: Mapping[str, object], required: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with the columns of one row."""
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
    for column in ("reward_model", "extra_info"):
        value = columns.get(column)
        if value is not None and not isinstance(value, Mapping):
            yield f"{column} must be a mapping, got {value!r:.80}"
    name = columns.get("agent_name")
    if name is not None and not isinstance(name, str):
        yield f"agent_name must be a string, got {name!r:.80}"


def _problems_of_prompt(prompt: object) -> Iterator[str]:
    if not isinstance(prompt, list) or not prompt:
        yield f"prompt must be a list of messages, got {prompt!r:.80}"
        return
    for index, message in enumerate(prompt):
        where = f"prompt[{index}]"
        if not isinstance(message, Mapping):
            yield f"{where} must be a mapping with role and content, got {message!r:.80}"
        elif unknown := sorted(set(message) - {"role", "content"}):
            yield f"{where} has unknown keys {', '.join(unknown)}; known: role, content"
        elif message.get("role") not in ("system", "user", "assistant"):
            yield f"{where}.role must be system, user or assistant, got {message.get('role')!r}"
        elif not isinstance(message.get("content"), str):
            yield f"{where}.content must be a string, got {message.get('content')!r:.80}"
