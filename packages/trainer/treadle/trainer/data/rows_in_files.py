"""Rows that stay in their files, for data larger than memory.

Invariant: in memory is where each row begins, 16 bytes or less per row, and for Parquet the last
row groups that were read. Row i is what reading the files in order would give as its i-th row. A
file that changes afterwards is an error, not another row.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

from treadle.trainer.data.errors import DataError
from treadle.trainer.data.files import parse_line, read_file
from treadle.trainer.data.own_reader import Placed
from treadle.trainer.data.row import Row, completed

if TYPE_CHECKING:
    import pyarrow

__all__ = ["RowsInFiles"]

_ROW_GROUPS = 2
_Stamp: TypeAlias = tuple[int, int]


class _Part(Protocol):
    """The rows of one file, which was read whole before."""

    def __len__(self) -> int: ...

    def get(self, index: int) -> Placed:
        """Returns one row with its place."""
        ...


class RowsInFiles(Sequence[Row]):
    """The rows of files, read when they are accessed.

    Args:
        files: In order; each was read whole before, without an error.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._stamps = [_stamp(file) for file in files]
        self._parts = [_open(file) for file in files]
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        """Reads one row, or several.

        Raises:
            DataError: Its file has changed.
            IndexError: There is no such row.
        """
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._ends, at)
        self._check(number)
        before = self._ends[number - 1] if number else 0
        place, columns = self._parts[number].get(at - before)
        return self._row(at, place, columns, number)

    def __iter__(self) -> Iterator[Row]:
        """Yields the rows in order, which is faster than by their index."""
        index = 0
        for number, file in enumerate(self._files):
            self._check(number)
            for place, columns in read_file(file):
                yield self._row(index, place, columns, number)
                index += 1

    def _row(self, index: int, place: str, columns: Mapping[str, object], number: int) -> Row:
        file = self._files[number]
        exact = file.suffix == ".jsonl"
        return Row(index=index, place=place, columns=completed(columns, file), exact=exact)

    def _check(self, number: int) -> None:
        file = self._files[number]
        if _stamp(file) != self._stamps[number]:
            raise DataError(
                f"{file} has changed since it was read at the start: with data.streaming=true it "
                "must stay as it is while the run lasts"
            )


def _stamp(file: Path) -> _Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _open(file: Path) -> _Part:
    match file.suffix:
        case ".jsonl":
            return _Lines(file)
        case ".parquet":
            return _RowGroups(file)
        case _:
            return _Batches(file)


class _Lines:
    """A `.jsonl` file, by the offsets of its lines."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offsets, self._numbers = array("Q"), array("Q")
        offset = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    self._offsets.append(offset)
                    self._numbers.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def get(self, index: int) -> Placed:
        """See `_Part`."""
        with self._file.open("rb") as lines:
            lines.seek(self._offsets[index])
            return parse_line(self._file, self._numbers[index], lines.readline())


class _Batches:
    """An `.arrow` file, mapped into memory: the operating system reads and drops its pages."""

    def __init__(self, file: Path) -> None:
        from treadle.trainer.data.files import arrow_batches

        self._file = file
        self._batches: list[pyarrow.RecordBatch] = list(arrow_batches(file))
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def get(self, index: int) -> Placed:
        """See `_Part`."""
        number = bisect_right(self._ends, index)
        start = self._ends[number - 1] if number else 0
        (columns,) = self._batches[number].slice(index - start, 1).to_pylist()
        return f"{self._file}, row {index + 1}", columns


class _RowGroups:
    """A `.parquet` file. A row is read with its row group, which may take long if that is large."""

    def __init__(self, file: Path) -> None:
        from pyarrow import parquet

        self._file = file
        with parquet.ParquetFile(file) as opened:
            groups = range(opened.metadata.num_row_groups)
            sizes = [opened.metadata.row_group(group).num_rows for group in groups]
        self._ends = list(accumulate(sizes))
        self._read = lru_cache(maxsize=_ROW_GROUPS)(self._read_group)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def get(self, index: int) -> Placed:
        """See `_Part`."""
        group = bisect_right(self._ends, index)
        start = self._ends[group - 1] if group else 0
        (columns,) = self._read(group).slice(index - start, 1).to_pylist()
        row: Mapping[str, object] = columns
        return f"{self._file}, row {index + 1}", row

    def _read_group(self, group: int) -> Any:
        from pyarrow import parquet

        with parquet.ParquetFile(self._file) as opened:
            return opened.read_row_group(group)
