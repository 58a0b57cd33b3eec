"""`treadle trajectories`: filters, SQL, formats, and errors that say what to do."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.tracing.trajectories import DIRECTORY, write_file
from treadle.tracing.trajectories.testing import make_row, make_rows, write_run
from treadle.trainer.demo import MODELS
from treadle.trainer.launch.process import child_python_path
from treadle.trainer.main import main


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), steps=2)


def _shown(
    capsys: pytest.CaptureFixture[str], run_dir: Path, *arguments: str
) -> tuple[list[Any], str]:
    """The objects that --format json prints, and the text beside them."""
    assert main(["trajectories", str(run_dir), "--format=json", *arguments]) == 0
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_filters_columns_order_and_limit(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, beside = _shown(
        capsys,
        run_dir,
        *("--filter", "phase=train reward>=0", "--filter", "tool=python"),
        *("--columns", "reward, task_id,metrics", "--order-by=-reward,-task_id", "--limit=3"),
    )
    assert [list(row) for row in rows] == [["reward", "task_id", "metrics"]] * 3
    assert rows[0] == {"reward": 1.0, "task_id": "train/3", "metrics": {"tool/calls": 1.0}}
    total = sum(
        row["reward"] is not None and row["tools"] == ["python"]
        for step in (1, 2)
        for row in make_rows(step, "train", rows=4, samples=4)
    )
    assert beside == f"3 of {total}; --limit shows more\n"
    rows, beside = _shown(capsys, run_dir, "--filter=step=99")
    assert (rows, beside) == ([], "")


def test_sql(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "SELECT step, sum(num_turns) AS n, 'nan'::float AS x FROM trajectories GROUP BY 1"
    rows, _ = _shown(capsys, run_dir, "--sql", f"{query} ORDER BY 1")
    turns = [
        sum(
            row["num_turns"]
            for phase, count, samples in (("train", 4, 4), ("val", 2, 1))
            for row in make_rows(step, phase, rows=count, samples=samples)
        )
        for step in (1, 2)
    ]
    assert rows == [{"step": 1, "n": turns[0], "x": None}, {"step": 2, "n": turns[1], "x": None}]


def test_a_table_and_csv_are_inert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[31mred\x07 \u202eturned\n" + "long " * 50
    row = make_row(1, "train", 1, 1) | {"response": evil, "tools": ["a", "\x1b[2J"]}
    write_file(tmp_path / DIRECTORY, step=1, phase="train", rows=[row])
    assert main(["trajectories", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "\\u001b[31mred\\u0007 \\u202eturned long long" in table
    assert "a \\u001b[2J" in table
    assert main(["trajectories", str(tmp_path), "--format=csv", "--columns=step,response"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in table + text
    header, line = csv.reader(text.splitlines(keepends=True))
    assert header == ["step", "response"]
    assert line[0] == "1"
    assert line[1].endswith("turned\n" + "long " * 50)


def test_trajectories_are_read_as_conversations(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--format=text", "--filter=step=2 phase=train tool=python", "--limit=2"]
    assert main(["trajectories", str(run_dir), *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("step 2  train") == captured.out.count("[user]") == 2
    assert captured.out.count("-> python(") == 2
    assert "; --limit shows more" in captured.err


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / DIRECTORY
    write_file(directory, step=1, phase="train", rows=make_rows(1, "train", rows=1), left_out=1500)
    (directory / "step-000002-train.parquet").write_bytes(b"half")
    rows, beside = _shown(capsys, tmp_path)
    assert len(rows) == 1
    assert "step-000002-train.parquet: it cannot be read: " in beside
    assert "1,500 trajectories were not kept, because run.trajectories_max_bytes" in beside


def test_conversations_are_limited_after_the_same_ones_and_what_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "?"}]}\n')
    settings = {
        "data": {"train_files": ["rows.jsonl"], "val_files": ["rows.jsonl"]},
        "model": {"path": str(MODELS["demo:calculator"])},
        "agent": {"default_loop": "single_turn_agent"},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    rows = []
    for index, answer in enumerate("aabcd"):
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        kept = {"stop": "finished", "messages": json.dumps(said), "findings": []}
        rows.append(make_row(1, "train", 0, index) | kept)
    write_file(tmp_path / DIRECTORY, step=1, phase="train", rows=rows, left_out=1500)
    (tmp_path / DIRECTORY / "step-000002-train.parquet").write_bytes(b"half")
    options = ["--format=sft", "--limit=2", "--order-by=rollout_index"]
    assert main(["trajectories", str(tmp_path), *options]) == 0
    captured = capsys.readouterr()
    written = [json.loads(line)["messages"][1]["content"] for line in captured.out.splitlines()]
    assert written == ["a", "b"]
    counts, damaged, not_kept = captured.err.splitlines()
    assert counts == (
        "2 conversations of 3 trajectories; left out 1: the same conversation again; "
        "--limit left 2 unread"
    )
    assert "step-000002-train.parquet: it cannot be read: " in damaged
    assert not_kept.startswith("1,500 trajectories were not kept")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["empty"], "empty/trajectories has no trajectories: name the directory of a run"),
        (["RUN", "--filter=rewrd<1"], "did you mean reward? known are step, "),
        (["RUN", "--columns=rewrd"], "there is no column 'rewrd'; the columns are step, "),
        (["RUN", "--order-by=-rewrd"], "there is no column 'rewrd'"),
        (["RUN", "--sql=DROP VIEW trajectories"], "write one SELECT"),
        (["RUN", "--sql=SELECT 1", "--filter=step=1"], "--sql says itself which rows"),
        (["RUN", "--format=text", "--columns=step"], "--format text shows whole trajectories"),
        (["RUN", "--limit=0"], "--limit is 0: it must be at least 1"),
    ],
)
def test_what_is_wrong_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    arguments = [str(run_dir) if each == "RUN" else each for each in arguments]
    try:
        status = main(["trajectories", *arguments])
    except SystemExit as exit_:
        status = int(str(exit_.code))
    assert status == 2
    assert text in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_the_command_without_a_traceback(run_dir: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(
        (sys.executable, "-m", "treadle.trainer.main", "trajectories", run_dir, "--format=text"),
        env={**os.environ, "PYTHONPATH": child_python_path()},
        stdout=writes,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")
