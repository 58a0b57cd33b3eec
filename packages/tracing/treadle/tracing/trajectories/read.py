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
    OLD_SCHEMAS,
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
"""The columns that identify a trajectory; the order that breaks ties."""


_MISTAKES: Final = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.ConversionException,
    duckdb.NotImplementedException,
    duckdb.OutOfMemoryException,
    duckdb.OutOfRangeException,
    duckdb.ParserException,
    duckdb.PermissionException,
)
"""Errors of a query's text; others may come from a damaged file."""


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
    old: bool


class TrajectoryFiles:
    """The trajectory files of a run directory, which may grow meanwhile.

    Args:
        run_dir: A directory of a run or of an evaluation.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = (run_dir / DIRECTORY).resolve()
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._viewed: tuple[str, ...] = ()
        self._database = duckdb.connect(":memory:")
        self._database.register("empty", SCHEMA.empty_table())
        for text in (
            "CREATE TABLE no_trajectories AS SELECT * FROM empty",
            "CREATE VIEW trajectories AS SELECT * FROM no_trajectories",
        ):
            self._database.execute(text)
        self._database.unregister("empty")
        for setting in (
            f"allowed_directories = [{_quoted(str(self._directory))}]",
            "enable_external_access = false",
            "preserve_insertion_order = false",
            "lock_configuration = true",
        ):
            self._database.execute(f"SET {setting}")

    @property
    def damaged(self) -> dict[str, str]:
        """The problem of each file that is left out, by its name."""
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
            order_by: Columns, the first one first; -name for falling values. Missing values are
                last. What is equal is in the order of `ORDER`.
            limit: Maximum number of them; None: all.
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
        """Returns all columns of one trajectory; None if no good file has it. Reads one file.

        Args:
            step: Number of the step, 0 before training.
            phase: Value of the column `phase`.
            rollout_index: Among the samples of the row.
        """
        rows = self.read_files(
            [(step, phase)], groups=[(step, phase, task_id)], rollout_index=rollout_index
        )
        return next(iter(rows), None)

    def steps(self) -> list[tuple[int, str]]:
        """Returns step and phase of each file that queries read, in order."""
        self._cursor()
        return sorted(key for name in self._viewed if (key := parse_file_name(name)) is not None)

    def read_files(
        self,
        keys: Sequence[tuple[int, str]],
        columns: Sequence[str] = tuple(SCHEMA.names),
        *,
        groups: Sequence[tuple[int, str, str]] | None = None,
        rollout_index: int | None = None,
    ) -> list[dict[str, Any]]:
        """Returns trajectories of some files only, in the order of `ORDER`.

        Args:
            keys: Step and phase of each file; one that is damaged or gone is passed over.
            groups: Step, phase and task id; None: all of these files.
            rollout_index: None: all samples of a row.
        """
        while True:
            cursor = self._cursor()
            names = {file_name(*key) for key in keys}.intersection(self._viewed)
            text = (
                f"SELECT {', '.join(map(_column, columns))} FROM {self._source(sorted(names))} "
                "WHERE (? IS NULL OR list_contains(?, concat(step, ' ', phase, ' ', task_id))) AND "
                f"rollout_index = coalesce(?, rollout_index) ORDER BY {', '.join(ORDER)}"
            )
            wanted = None if groups is None else [" ".join(map(str, each)) for each in groups]
            try:
                return _rows(_fetched(cursor, text, [wanted, wanted, rollout_index]))
            except (duckdb.Error, pa.ArrowInvalid) as error:
                if not self._explains(error):
                    raise

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
        except (duckdb.Error, pa.ArrowInvalid) as error:
            raise SqlError(str(error)) from None

    def _run(self, text: str, values: Sequence[object] = ()) -> pa.Table:
        while True:
            cursor = self._cursor()
            try:
                return _fetched(cursor, text, values)
            except (duckdb.Error, pa.ArrowInvalid) as error:
                if not self._explains(error):
                    raise

    def _explains(self, error: duckdb.Error | pa.ArrowInvalid) -> bool:
        """Returns whether a file turns out to be damaged, although its footer is whole.

        Reads all files, unless the error is one of the query's text.
        """
        if isinstance(error, _MISTAKES):
            return False
        with self._lock:
            return self._find_damage()

    def _find_damage(self) -> bool:
        """Reads all files that count as good; returns whether one of them is not."""
        cursor = self._database.cursor()
        found: dict[str, _File] = {}
        for name, file in self._files.items():
            if file.damage is None:
                try:
                    _fetched(cursor, f"SELECT * FROM {self._source([name])}")
                except (duckdb.Error, pa.ArrowInvalid) as error:
                    found[name] = file._replace(damage=f"it is damaged: {error}")
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
            while (good := self._good()) != self._viewed:
                text = f"CREATE OR REPLACE VIEW trajectories AS SELECT * FROM {self._source(good)}"
                try:
                    self._database.execute(text)
                    self._viewed = good
                except duckdb.Error:  # DuckDB is stricter with footers than Arrow
                    if not self._find_damage():
                        raise
            return self._database.cursor()

    def _good(self) -> tuple[str, ...]:
        return tuple(sorted(name for name, file in self._files.items() if file.damage is None))

    def _source(self, names: Sequence[str]) -> str:
        paths = ", ".join(_quoted(str(self._directory / name)) for name in names)
        if not any(self._files[name].old for name in names):
            return f"read_parquet([{paths}])" if names else "no_trajectories"
        # Slower, because DuckDB reads every footer first.
        return (
            "(SELECT * FROM no_trajectories UNION ALL BY NAME "
            f"SELECT * FROM read_parquet([{paths}], union_by_name = true))"
        )

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
                left_out, damage, old = _examined(path)
                known = _File(stat.st_mtime_ns, stat.st_size, left_out, damage, old)
            found[path.name] = known
        self._files = found


def _examined(path: Path) -> tuple[int, str | None, bool]:
    """Returns how many trajectories a file left out, its defect if any, and whether it is old."""
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        return 0, f"it cannot be read: {error}", False
    metadata = schema.metadata or {}
    version = metadata.get(SCHEMA_VERSION_KEY, b"none").decode(errors="replace")
    schemas = {str(number): old for number, old in (OLD_SCHEMAS | {SCHEMA_VERSION: SCHEMA}).items()}
    if version not in schemas:
        return 0, f"its version is {version}, and this Treadle reads {', '.join(schemas)}", False
    if not schema.equals(schemas[version]):
        return 0, "its columns are not those of its version", False
    left_out = metadata.get(LEFT_OUT_KEY, b"")
    if not left_out.isdigit():
        return 0, "its metadata is damaged", False
    return int(left_out), None, version != str(SCHEMA_VERSION)


def _fetched(
    cursor: duckdb.DuckDBPyConnection, text: str, values: Sequence[object] = ()
) -> pa.Table:
    """Returns the result of a query, whose strings are UTF-8.

    Raises:
        ArrowInvalid: They are not.
        Error: The query failed.
    """
    table = cursor.sql(text, params=list(values)).to_arrow_table()
    table.validate(full=True)
    return table


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
