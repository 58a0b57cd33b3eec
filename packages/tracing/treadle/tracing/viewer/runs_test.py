import fcntl
import json
from pathlib import Path

from treadle.tracing.trajectories.testing import write_run
from treadle.tracing.viewer.runs import open_runs


def _only(directory: Path) -> dict[str, object]:
    (run,) = open_runs([directory])
    return run.describe()


def test_runs_are_told_apart_by_the_shortest_ends_of_their_paths(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a/first", "b/first", "b/second")]
    for path in paths:
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
    assert [run.name for run in open_runs(paths[1:])] == ["first", "second"]
    assert [run.name for run in open_runs(paths)] == ["a/first", "b/first", "b/second"]


def test_a_whole_run_has_no_problems(tmp_path: Path) -> None:
    write_run(tmp_path, steps=1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "config.json").write_text('{"run": {"name": "x"}}')
    (tmp_path / "status.json").write_text('{"state": "finished", "error": null}')
    (tmp_path / "notes.jsonl").write_text('{"step": 1, "note": "first drift"}\n{"step')
    found = _only(tmp_path)
    assert found["problems"] == []
    assert found["state"] == "finished"
    assert found["notes"] == [{"step": 1, "note": "first drift"}]
    assert found["config"] == {"run": {"name": "x"}}


def test_whatever_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2, val_rows=0)
    file = tmp_path / "trajectories" / "step-000002-train.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "status.json").write_text("{")
    (tmp_path / "notes.jsonl").write_text('"text"\n')
    problems = "\n".join(map(str, _only(tmp_path)["problems"]))  # type: ignore[call-overload]
    for said in (
        "metrics.jsonl is missing",
        "config.json is damaged: it is not an object",
        "status.json is damaged",
        "notes.jsonl: 1 damaged lines",
        "step-000002-train.parquet is left out",
    ):
        assert said in problems
    assert "step-000001" not in problems


def test_a_run_that_nobody_holds_was_killed(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "step": 3}))
    assert _only(tmp_path)["state"] == "killed"
    with (tmp_path / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert _only(tmp_path)["state"] == "running"
    assert _only(tmp_path)["state"] == "killed"
