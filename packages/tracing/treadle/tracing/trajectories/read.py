"""Queries the trajectory files of a run with DuckDB, also while the run writes them.

Each query sees the files that were there when it began. DuckDB reads of them the columns and the
row groups that the query needs; nothing is loaded before, and nothing is kept between queries but
the names of the files that were found good.

Invariant: a query reads whole files of a known version only. A file that is damaged, of another
version, or without the columns of the schema is left out and named in `damaged` until it is
replaced. Queries read: SQL that would change something, or read other files, is refused.
Any thread may query.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from treadle.tracing.trajectories.filter import Filter
from treadle.tracing.trajectories.schema import (
    DIRECTORY,
    LEFT_OUT_KEY,
    SCHEMA,
    SCHEMA_VERSION,
    SCHEMA_VERSION_KEY,
    file_name,
    parse_file_name,
)

__all__ = ["LIST_COLUMNS", "ORDER", "SqlError", "TrajectoryFiles", "UnknownColumnError"]

LIST_COLUMNS: Final = tuple(
    name
    for name in SCHEMA.names
    if name not in ("traceback", "messages", "samples", "findings", "metrics", "trace")
)
"""The columns that are small: without token arrays, conversations and traces."""
ORDER: Final = ("step", "phase", "task_id", "rollout_index")
"""What identifies a trajectory; the order that breaks ties."""


class UnknownColumnError(ValueError):
    """There is no such column; the message lists the known ones."""


class SqlError(ValueError):
    """The text is no query that DuckDB can run here; the message is DuckDB's."""


class _File(NamedTuple):
    """A file as it was examined: its damage is None if it is good."""

    modified_ns: int
    size: int
    left_out: int
    damage: str | None


class TrajectoryFiles:
    """The trajectory files of a run directory, which may grow meanwhile.

    Args:
        run_dir: A directory of a run or of an evaluation.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = (run_dir / DIRECTORY).resolve()
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._viewed: tuple[str, ...] | None = None
        self._database = duckdb.connect(":memory:")
        for setting in (
            f"allowed_directories = [{_quoted(str(self._directory))}]",
            "enable_external_access = false",
            "preserve_insertion_order = false",
            "lock_configuration = true",
        ):
            self._database.execute(f"SET {setting}")

    @property
    def damaged(self) -> dict[str, str]:
        """What is wrong with each file that is left out, by its name."""
        self._cursor()
        return {n: f.damage for n, f in self._files.items() if f.damage is not None}

    @property
    def num_files(self) -> int:
        """Number of files that queries read."""
        self._cursor()
        return sum(f.damage is None for f in self._files.values())

    @property
    def left_out(self) -> int:
        """Number of trajectories that the run did not keep, because its budget was spent."""
        self._cursor()
        return sum(f.left_out for f in self._files.values() if f.damage is None)

    def query(
        self,
        where: Filter = Filter(),  # noqa: B008  # immutable
        columns: Sequence[str] = LIST_COLUMNS,
        order_by: Sequence[str] = (),
        limit: int | None = None,
        offset: int = 0,
    ) -> list[dict[str, Any]]:
        """Returns trajectories as plain data, by column; see `table`.

        Raises:
            UnknownColumnError: A column is not one of the schema.
        """
        return _rows(self.table(where, columns, order_by, limit, offset))

    def table(
        self,
        where: Filter = Filter(),  # noqa: B008  # immutable
        columns: Sequence[str] = LIST_COLUMNS,
        order_by: Sequence[str] = (),
        limit: int | None = None,
        offset: int = 0,
    ) -> pa.Table:
        """Returns trajectories as an Arrow table.

        Args:
            where: Which.
            columns: Names of the schema.
            order_by: Columns, the first one first; -name for falling values. Missing values are
                last. What is equal is in the order of `ORDER`.
            limit: Maximum number; None: all.
            offset: Number of trajectories to skip before.

        Raises:
            UnknownColumnError: A column is not one of the schema.
        """
        condition, values = where.sql()
        selected = ", ".join(map(_column, columns))
        keys = [_order(name) for name in order_by] + list(ORDER)
        text = (
            f"SELECT {selected} FROM trajectories WHERE {condition} "
            f"ORDER BY {', '.join(keys)} LIMIT ? OFFSET ?"
        )
        return self._run(text, [*values, limit, offset])

    def count(self, where: Filter = Filter()) -> int:  # noqa: B008  # immutable
        """Returns the number of trajectories that pass."""
        condition, values = where.sql()
        counted = self._run(f"SELECT count(*) FROM trajectories WHERE {condition}", values)
        return int(counted.column(0)[0].as_py())

    def one(self, step: int, phase: str, task_id: str, rollout_index: int) -> dict[str, Any] | None:
        """Returns all columns of one trajectory; None if no good file has it. Reads one file."""
        cursor = self._cursor()
        name = file_name(step, phase)
        if self._viewed is None or name not in self._viewed:
            return None
        text = (
            f"SELECT * FROM read_parquet({_quoted(str(self._directory / name))}) "
            "WHERE task_id = ? AND rollout_index = ?"
        )
        try:
            found = cursor.sql(text, params=[task_id, rollout_index]).to_arrow_table()
        except duckdb.Error as error:
            if self._explains(error):
                return None
            raise
        return next(iter(_rows(found)), None)

    def sql(self, text: str) -> pa.Table:
        """Returns the result of a query over the view `trajectories`.

        Args:
            text: One SELECT, or what DuckDB runs as one (WITH, FROM, DESCRIBE, SUMMARIZE), or an
                EXPLAIN.

        Raises:
            SqlError: It is none, or DuckDB cannot run it.
        """
        readers = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        try:
            statements = duckdb.extract_statements(text)
            if len(statements) != 1 or statements[0].type not in readers:
                raise SqlError(
                    "write one SELECT, as SELECT step, avg(reward) FROM trajectories GROUP BY step"
                )
            return self._run(text)
        except duckdb.Error as error:
            raise SqlError(str(error)) from None

    def _run(self, text: str, values: Sequence[object] = ()) -> pa.Table:
        while True:
            cursor = self._cursor()
            try:
                return cursor.sql(text, params=list(values)).to_arrow_table()
            except duckdb.Error as error:
                if not self._explains(error):
                    raise

    def _explains(self, error: duckdb.Error) -> bool:
        """Returns whether a file turns out to be damaged, although its footer is whole.

        Reads all files if the error can come from a damaged one.
        """
        if type(error) is not duckdb.Error and "Failed to read file" not in str(error):
            return False
        with self._lock:
            found = {
                name: file._replace(damage=damage)
                for name, file in self._files.items()
                if file.damage is None and (damage := _damage(self._directory / name)) is not None
            }
            self._files |= found
        return bool(found)

    def close(self) -> None:
        """Closes the database. Idempotent."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        """Returns a connection whose view has the files that are there now."""
        with self._lock:
            self._examine()
            good = tuple(sorted(n for n, f in self._files.items() if f.damage is None))
            if good != self._viewed:
                self._database.execute(f"CREATE OR REPLACE VIEW trajectories AS {self._from(good)}")
                self._viewed = good
            return self._database.cursor()

    def _from(self, names: Sequence[str]) -> str:
        if names:
            paths = ", ".join(_quoted(str(self._directory / name)) for name in names)
            return f"SELECT * FROM read_parquet([{paths}])"
        empty = self._database.from_arrow(SCHEMA.empty_table())
        types = zip(empty.columns, empty.types, strict=True)
        return f"SELECT {', '.join(f'NULL::{kind} AS {name}' for name, kind in types)} LIMIT 0"

    def _examine(self) -> None:
        found: dict[str, _File] = {}
        for path in self._directory.iterdir() if self._directory.is_dir() else ():
            if parse_file_name(path.name) is None:
                continue
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue  # removed meanwhile
            known = self._files.get(path.name)
            if known is None or known[:2] != (stat.st_mtime_ns, stat.st_size):
                left_out, damage = _examined(path)
                known = _File(stat.st_mtime_ns, stat.st_size, left_out, damage)
            found[path.name] = known
        self._files = found


def _examined(path: Path) -> tuple[int, str | None]:
    """Returns what a file says that it left out, and what is wrong with it."""
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        return 0, f"it cannot be read: {error}"
    metadata = schema.metadata or {}
    version = metadata.get(SCHEMA_VERSION_KEY, b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        return 0, f"its version is {version}, and this Treadle reads {SCHEMA_VERSION}"
    if not schema.equals(SCHEMA):
        return 0, "its columns are not those of its version"
    left_out = metadata.get(LEFT_OUT_KEY, b"")
    return (int(left_out), None) if left_out.isdigit() else (0, "its metadata is damaged")


def _damage(path: Path) -> str | None:
    """Returns what is wrong with the content of a file."""
    try:
        for _ in pq.ParquetFile(path).iter_batches():
            pass
    except (OSError, pa.ArrowException) as error:
        return f"it is damaged: {error}"
    return None


def _column(name: str) -> str:
    if name not in SCHEMA.names:
        raise UnknownColumnError(
            f"there is no column {name!r}; the columns are {', '.join(SCHEMA.names)}"
        )
    return name


def _order(name: str) -> str:
    direction = "DESC" if name.startswith("-") else "ASC"
    return f"{_column(name.removeprefix('-'))} {direction} NULLS LAST"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    return rows
