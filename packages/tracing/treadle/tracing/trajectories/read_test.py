"""Queries see what is there, of whole files only, and change nothing."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.tracing.trajectories.filter import FILTER_COLUMNS, Condition, Filter
from treadle.tracing.trajectories.read import (
    LIST_COLUMNS,
    SqlError,
    TrajectoryFiles,
    UnknownColumnError,
)
from treadle.tracing.trajectories.schema import (
    DIRECTORY,
    LEFT_OUT_KEY,
    SCHEMA,
    SCHEMA_VERSION_KEY,
)
from treadle.tracing.trajectories.testing import make_row, make_rows, write_run
from treadle.tracing.trajectories.write import write_file

SHARED = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
"""Examples may share a fixture, and may be drawn slowly: this list replaces that of the profile."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), steps=3)


@pytest.fixture
def files(run_dir: Path) -> Iterator[TrajectoryFiles]:
    opened = TrajectoryFiles(run_dir)
    yield opened
    opened.close()


def _every() -> list[dict[str, Any]]:
    return [
        row
        for step in (1, 2, 3)
        for phase, rows, samples in (("train", 4, 4), ("val", 2, 1))
        for row in make_rows(step, phase, rows=rows, samples=samples)
    ]


_SAME: dict[str, Callable[[dict[str, Any]], bool]] = {
    "reward<0.5": lambda r: r["reward"] is not None and r["reward"] < 0.5,
    "reward!=1": lambda r: r["reward"] != 1.0,
    "reward=": lambda r: r["reward"] is None,
    "tool~PYTH": lambda r: "python" in r["tools"],
    "tool=calculator": lambda r: "calculator" in r["tools"],
    "tool!=calculator": lambda r: "calculator" not in r["tools"],
    "tool=": lambda r: not r["tools"],
    "finding=drift": lambda r: r["drift"] > 0,
    "error!=": lambda r: r["error"] is not None,
    "error=": lambda r: r["error"] is None,
    "error!~sandbox": lambda r: r["error"] is None,
    'text~"THE SANDBOX is" phase=train': lambda r: r["error"] is not None and r["phase"] == "train",
    "step>=2 phase=val": lambda r: r["step"] >= 2 and r["phase"] == "val",
    'response~"answer is 6."': lambda r: "answer is 6." in r["response"],
}


@pytest.mark.parametrize("text", _SAME)
def test_a_filter_passes_what_it_says(files: TrajectoryFiles, text: str) -> None:
    expected = [row for row in _every() if _SAME[text](row)]
    assert expected
    found = files.query(Filter.parse(text), columns=["step", "phase", "task_id", "rollout_index"])
    assert [tuple(row.values()) for row in found] == sorted(
        (r["step"], r["phase"], r["task_id"], r["rollout_index"]) for r in expected
    )
    assert files.count(Filter.parse(text)) == len(expected)


@settings(suppress_health_check=SHARED, max_examples=30)
@given(st.sampled_from(sorted(FILTER_COLUMNS)), st.sampled_from(["=", "~"]), st.text())
def test_a_negated_condition_passes_the_others(
    files: TrajectoryFiles, name: str, operator: str, value: str
) -> None:
    if FILTER_COLUMNS[name].kind == "number":
        return
    holds = Filter((Condition(name, operator, value),))  # type: ignore[arg-type]
    fails = Filter((Condition(name, f"!{operator}", value),))  # type: ignore[arg-type]
    assert files.count(holds) + files.count(fails) == files.count()


def test_order_limit_and_offset_give_pages(files: TrajectoryFiles) -> None:
    every = files.query(order_by=["-reward", "duration_s"])
    assert list(every[0]) == list(LIST_COLUMNS)
    rewards = [row["reward"] for row in every]
    assert rewards == sorted(rewards, key=lambda r: math.inf if r is None else -r)
    pages = [
        files.query(order_by=["-reward", "duration_s"], limit=20, offset=n) for n in (0, 20, 40)
    ]
    assert [row for page in pages for row in page] == every
    with pytest.raises(UnknownColumnError, match="no column 'rewards'; the columns are step, "):
        files.query(order_by=["-rewards"])
    with pytest.raises(UnknownColumnError, match="no column '1; DROP VIEW trajectories'"):
        files.query(columns=["1; DROP VIEW trajectories"])


def test_one_trajectory_has_all_columns(files: TrajectoryFiles) -> None:
    one = files.one(2, "train", "train/1", 2)
    assert one is not None
    written = make_row(2, "train", 1, 2)
    assert list(one) == SCHEMA.names
    assert one | {"samples": 0} == written | {"samples": 0}
    sample = one["samples"][0]
    assert sample["spans"] == written["samples"][0]["spans"]
    sampled = [not math.isnan(value) for value in sample["logprobs"]]
    assert sum(sampled) == written["num_sampled_tokens"]
    assert files.one(2, "train", "train/1", 99) is None
    assert files.one(9, "train", "train/1", 0) is None


def test_sql_reads_the_view_and_nothing_else(files: TrajectoryFiles, run_dir: Path) -> None:
    table = files.sql("SELECT step, count(*) AS n FROM trajectories GROUP BY step ORDER BY step")
    assert table.to_pylist() == [{"step": step, "n": 18} for step in (1, 2, 3)]
    assert files.sql("DESCRIBE trajectories").num_rows == len(SCHEMA)
    assert files.sql("EXPLAIN FROM trajectories").num_rows == 1
    for text, says in {
        "DROP VIEW trajectories": "write one SELECT",
        "SELECT 1; SELECT 2": "write one SELECT",
        f"COPY trajectories TO '{run_dir / DIRECTORY / 'x.csv'}'": "write one SELECT",
        "": "write one SELECT",
        "SELECT * FROM read_csv('/etc/passwd')": "file system operations are disabled",
        "SELECT colour FROM trajectories": '"colour" not found',
        "SELEC 1": "syntax error",
    }.items():
        with pytest.raises(SqlError, match=says):
            files.sql(text)


def test_files_that_come_and_go_are_seen(tmp_path: Path) -> None:
    files = TrajectoryFiles(tmp_path / "run's")
    assert files.count() == 0
    assert files.query() == []
    assert files.sql("DESCRIBE trajectories").num_rows == len(SCHEMA)
    directory = tmp_path / "run's" / DIRECTORY
    rows = list(make_rows(1, "train", rows=2))
    write_file(directory, step=1, phase="train", rows=rows, left_out=7)
    assert files.count() == 2
    write_file(directory, step=2, phase="train", rows=rows, left_out=1)
    assert (files.count(), files.left_out) == (4, 8)
    (directory / "step-000002-train.parquet").unlink()
    assert (files.count(), files.left_out) == (2, 7)


def _version(path: Path, metadata: dict[bytes, bytes]) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata(metadata), path)


def test_older_files_are_read_and_lack_what_came_later(tmp_path: Path) -> None:
    directory = write_run(tmp_path, steps=2, rows=1, val_rows=0) / DIRECTORY
    before = TrajectoryFiles(tmp_path).query(columns=SCHEMA.names)
    old = min(directory.iterdir())
    table = pq.read_table(old).drop_columns(["sample_rewards"])
    metadata = {SCHEMA_VERSION_KEY: b"1", LEFT_OUT_KEY: b"0"}
    pq.write_table(table.replace_schema_metadata(metadata), old)
    files = TrajectoryFiles(tmp_path)
    # As text: NaN is not equal to itself.
    assert str(files.query(columns=SCHEMA.names)) == str(before) and not files.damaged
    (one,) = files.query(Filter.parse("step=1"), limit=1)
    assert list(files.one(1, "train", one["task_id"], one["rollout_index"]) or {}) == SCHEMA.names
    rewards = [{"player": "white", "value": 1.0}, {"player": "black", "value": -1.0}]
    rows = [row | {"sample_rewards": rewards} for row in make_rows(2, "train", rows=1)]
    write_file(directory, step=2, phase="train", rows=rows)
    found = files.sql("SELECT DISTINCT step, sample_rewards[2].value AS black FROM trajectories")
    assert {row["step"]: row["black"] for row in found.to_pylist()} == {1: None, 2: -1.0}


def test_what_is_damaged_or_unknown_is_left_out_and_named(tmp_path: Path) -> None:
    directory = write_run(tmp_path, steps=7, rows=1, val_rows=0) / DIRECTORY
    paths = sorted(directory.iterdir())
    paths[0].write_bytes(paths[0].read_bytes()[:-50])
    paths[1].write_bytes(b"")
    _version(paths[2], {SCHEMA_VERSION_KEY: b"99", LEFT_OUT_KEY: b"0"})
    _version(paths[3], {})
    pq.write_table(
        pa.table({"step": [1]}).replace_schema_metadata({SCHEMA_VERSION_KEY: b"2"}), paths[4]
    )
    content = bytearray(paths[5].read_bytes())
    content[4:200] = bytes(196)  # the first pages
    paths[5].write_bytes(content)
    (directory / "step-000009-train.parquet.partial").write_bytes(b"half")
    files = TrajectoryFiles(tmp_path)
    assert files.one(6, "train", "train/0", 0) is None
    assert files.count() == 4
    assert {row["step"] for row in files.query()} == {7}
    says = [files.damaged[path.name] for path in paths[:6]]
    assert len(files.damaged) == 6
    assert "cannot be read" in says[0]
    assert "cannot be read" in says[1]
    assert says[2] == "its version is 99, and this Treadle reads 1, 2"
    assert says[3] == "its version is none, and this Treadle reads 1, 2"
    assert says[4] == "its columns are not those of its version"
    assert "it is damaged" in says[5]
    write_file(directory, step=1, phase="train", rows=make_rows(1, "train", rows=1))
    assert {row["step"] for row in files.query()} == {1, 7}


def test_damage_that_a_query_meets_is_found_by_it(tmp_path: Path) -> None:
    directory = write_run(tmp_path, steps=2, rows=1, val_rows=0) / DIRECTORY
    path = directory / "step-000002-train.parquet"
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)  # the first pages
    path.write_bytes(content)
    files = TrajectoryFiles(tmp_path)
    assert {row["step"] for row in files.query()} == {1}
    assert list(files.damaged) == [path.name]
    with pytest.raises(duckdb.Error):
        duckdb.execute(f"FROM read_parquet('{path}')").fetchall()


@settings(suppress_health_check=SHARED, max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0), st.binary(min_size=1, max_size=8)), min_size=1))
def test_any_damage_of_a_file_leaves_the_others(
    tmp_path: Path, changes: list[tuple[int, bytes]]
) -> None:
    directory = write_run(tmp_path, steps=2, rows=1, samples=1, val_rows=0) / DIRECTORY
    path = directory / "step-000001-train.parquet"
    content = bytearray(path.read_bytes())
    for place, new in changes:
        start = place % len(content)
        content[start : start + len(new)] = new
    path.write_bytes(content)
    with TrajectoryFiles(tmp_path) as files:
        rows = files.query(columns=SCHEMA.names)
        assert sum(row["step"] == 2 for row in rows) >= 1
        if files.damaged:
            assert [row["step"] for row in rows] == [2]
            assert files.one(1, "train", "train/0", 0) is None


def test_threads_may_query_at_once(files: TrajectoryFiles) -> None:
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(len(files.query(Filter.parse("step=2")))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [18] * 4
