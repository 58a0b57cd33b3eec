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
from treadle.trainer.hub import HubError, download_data, is_data_uri

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
    """
    rows: list[Row] = []
    for path in _local(paths):
        before = len(rows)
        for place, columns in _read(path):
            _check(place, columns, required)
            rows.append(Row(index=len(rows), place=place, columns=columns))
            if len(rows) == limit:
                return tuple(rows)
        if len(rows) == before:
            raise DataError(f"{path} has no rows")
    return tuple(rows)


def _local(paths: Sequence[Path]) -> Iterator[Path]:
    """Yields the files, those on the Hub from its cache."""
    for path in paths:
        if is_data_uri(path):
            try:
                yield from download_data(path)
            except HubError as error:
                raise DataError(str(error)) from None
        else:
            yield path


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


def _check(place: str, columns: Mapping[str, object], required: Sequence[str]) -> None:
    for column in required:
        if columns.get(column) is None:
            what = "is null" if column in columns else "is missing"
            present = ", ".join(columns) or "none"
            raise DataError(
                f"{place}: the column {column!r} {what}{nearest(column, columns)}; "
                f"columns present: {present}"
            )
    if (prompt := columns.get("prompt")) is not None:
        _check_prompt(place, prompt)
    for column in ("reward_model", "extra_info"):
        value = columns.get(column)
        if value is not None and not isinstance(value, Mapping):
            raise DataError(f"{place}: {column} must be a mapping, got {value!r:.80}")
    name = columns.get("agent_name")
    if name is not None and not isinstance(name, str):
        raise DataError(f"{place}: agent_name must be a string, got {name!r:.80}")


def _check_prompt(place: str, prompt: object) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{place}: prompt must be a list of messages, got {prompt!r:.80}")
    for index, message in enumerate(prompt):
        where = f"{place}: prompt[{index}]"
        if not isinstance(message, Mapping):
            raise DataError(f"{where} must be a mapping with role and content, got {message!r:.80}")
        unknown = sorted(set(message) - {"role", "content"})
        if unknown:
            raise DataError(f"{where} has unknown keys {', '.join(unknown)}; known: role, content")
        if message.get("role") not in ("system", "user", "assistant"):
            raise DataError(
                f"{where}.role must be system, user or assistant, got {message.get('role')!r}"
            )
        if not isinstance(message.get("content"), str):
            raise DataError(f"{where}.content must be a string, got {message.get('content')!r:.80}")
