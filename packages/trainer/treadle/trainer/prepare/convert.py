"""Finds the published files of a data set, converts their rows, and writes them.

Invariant: a file is written whole or not at all. Of what was published only one batch of rows is in
memory at a time; what is written is held until it is complete.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treadle.trainer.data.dataset import problems_of
from treadle.trainer.data.errors import DataError
from treadle.trainer.data.files import find_files, read_file
from treadle.trainer.data.row_problems import RowProblems
from treadle.trainer.prepare.sets import DataSet

__all__ = ["Format", "Written", "convert"]

Format = Literal["parquet", "jsonl"]
_KINDS = (".parquet", ".jsonl", ".arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A written file, its number of rows, and how many were left out as repetitions."""

    path: Path
    rows: int
    repeated: int


def convert(
    data_set: DataSet,
    output: Path,
    *,
    source: Path | None = None,
    file_format: Format = "parquet",
    limit: int | None = None,
) -> Iterator[Written]:
    """Writes the files of a data set into a directory, one after another.

    Args:
        output: Made if it is missing; files of the same names are replaced.
        source: A copy of what was published; None: from the Hub.
        limit: Maximum number of rows of each file; None: all.

    Raises:
        DataError: A file cannot be fetched, or a row has another form.
        SeveralProblems: Rows have several forms that are wrong.
        OSError: A file cannot be written.
    """
    places = {name: _published(data_set, name, source) for name in data_set.files}
    if source is not None and not any(places.values()):
        raise DataError(
            f"{source} holds none of {', '.join(f'{name}*' for name in places)} "
            f"({', '.join(_KINDS)})"
        )
    for name, files in places.items():
        if not files:
            continue
        rows, repeated = _rows(data_set, name, files, limit)
        if not rows:
            raise DataError(f"{files[0]} has no rows")
        path = output / f"{name}.{file_format}"
        _write(rows, path)
        yield Written(path=path, rows=len(rows), repeated=repeated)


def _published(data_set: DataSet, name: str, source: Path | None) -> Sequence[Path]:
    """Returns the published files of a written one; none if a local copy may lack them.

    Raises:
        DataError: There is none, or several that are not parts of one.
    """
    published = data_set.files[name]
    if source is None:
        return find_files(Path(f"hf://datasets/{published}"))
    # A clone of the repository, a folder of it, or files under the names of ours.
    inside = published.split("/", 2)[2]
    if files := sorted(source.glob(inside)):
        return files
    parts = sorted(source.glob(inside.rpartition("/")[2]))
    files = sorted(file for file in source.glob(f"{name}*") if file.suffix in _KINDS)
    if parts and set(files) <= set(parts):
        return parts
    if len(files) == 1 or (not files and data_set.some):
        return files
    found = ", ".join(file.name for file in files) or "none"
    kinds = " or ".join(f"{name}*{kind}" for kind in _KINDS)
    raise DataError(f"{source} must hold {inside}, or one file {kinds}; it has: {found}")


def _rows(
    data_set: DataSet, name: str, files: Sequence[Path], limit: int | None
) -> tuple[list[dict[str, object]], int]:
    rows: list[dict[str, object]] = []
    seen: set[str] = set()
    repeated = 0
    problems = RowProblems("rows")
    for file in files:
        for place, columns in read_file(file):
            if len(rows) == limit:
                break
            if wrong := tuple(problems_of(columns, data_set.required)):
                for problem in wrong:
                    problems.add(place, problem)
                continue
            try:
                row = data_set.make_row(columns, split=name, index=len(rows))
            except ValueError as error:
                problems.add(place, str(error), error)
                continue
            if data_set.once:
                key = json.dumps(row["prompt"], sort_keys=True)
                if key in seen:
                    repeated += 1
                    continue
                seen.add(key)
            rows.append(row)
    problems.raise_if_any()
    return rows, repeated


def _write(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        _write_rows(rows, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _write_rows(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    if ".parquet" in path.name:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return
    with path.open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps(row, ensure_ascii=False, default=_no_json) + "\n" for row in rows
        )


def _no_json(value: object) -> object:
    kind = type(value).__name__
    raise DataError(f"a row holds {kind}, which JSON has not: write it with --format parquet")
