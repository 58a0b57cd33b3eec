import json
from pathlib import Path
from typing import Any

import pytest

from treadle.tracing.trajectories import write_file
from treadle.tracing.trajectories.testing import make_row, make_rows, write_run
from treadle.tracing.viewer.one_file import make_page


def _data(page: str) -> dict[str, Any]:
    text = page.partition('id="one-file">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def test_whole_groups_are_spread_over_the_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=50, rows=4, samples=10, val_rows=2)
    found = _data(make_page(run, name="r", summary=()))
    groups: dict[tuple[object, ...], int] = {}
    for row in found["trajectories"]:
        key = (row["phase"], row["step"], row["task_id"])
        groups[key] = groups.get(key, 0) + 1
    assert {size for (phase, *_), size in groups.items() if phase == "train"} == {10}
    trained = [step for phase, step, _ in groups if phase == "train"]
    assert (min(trained), max(trained), len(trained)) == (1, 50, len(set(trained)))
    rewards: dict[tuple[object, ...], set[object]] = {
        key: set() for key in groups if key[0] == "train"
    }
    for row in found["trajectories"]:
        if row["phase"] == "train":
            rewards[(row["phase"], row["step"], row["task_id"])].add(row["reward"])
    assert all(len(of_group) > 1 for of_group in rewards.values()), "those with differing rewards"
    assert 200 < len(found["trajectories"]) <= 300 < found["num_trajectories"]


def test_its_size_is_bounded(tmp_path: Path) -> None:
    rows = list(make_rows(1, "train", rows=5, samples=2))
    said = [{"role": "user", "content": "long " * 1_000_000}]
    rows[9] |= {"num_tokens": 1_000_000}
    rows[0] |= {"messages": json.dumps(said), "traceback": "deep " * 1_000_000}
    write_file(tmp_path / "trajectories", step=1, phase="train", rows=rows)
    lines = ({"step": step, "x": 1 / 3} for step in range(5_000))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + "nonsense\n")
    page = make_page(tmp_path, name="r", summary=())
    assert len(page) < 2_000_000
    found = _data(page)
    assert [row.get("cut") for row in found["trajectories"]] == [
        *[True, None, None, None, None, None, None, None, True, True]
    ]
    assert (found["num_steps"], found["metrics"]["damaged"]) == (5_000, 1)
    assert [found["metrics"]["lines"][i]["step"] for i in (0, -1)] == [0, 4_999]


def test_no_text_of_a_run_is_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    row = make_row(1, "train", 0, 0) | {"prompt": evil, "task_id": evil, "metrics": {evil: 1.0}}
    write_file(tmp_path / "trajectories", step=1, phase="train", rows=[row])
    (tmp_path / "notes.jsonl").write_text(json.dumps({"step": 1, "note": evil}) + "\n")
    page = make_page(tmp_path, name=evil, summary=((evil,),))
    assert evil not in page
    assert "alert(1)<" not in page
    found = _data(page)
    assert found["runs"][0]["name"] == found["trajectories"][0]["prompt"] == evil


def test_what_is_nested_deeply_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text('{"step": 1e999, "note": "a"}\n')
    assert _data(make_page(tmp_path, name="r", summary=()))["runs"][0]["notes"] == []
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 600 + "]" * 600 + "}")
    with pytest.raises(ValueError, match="nests too deeply"):
        make_page(tmp_path, name="r", summary=())


def test_what_is_damaged_is_named_in_the_page(tmp_path: Path) -> None:
    for name in ("status.json", "config.json"):
        (tmp_path / name).write_text("no json")
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step-000001-train.parquet").write_bytes(b"PAR1")
    found = _data(make_page(tmp_path, name="r", summary=()))
    problems = " ".join(found["runs"][0]["problems"])
    for name in ("status.json is damaged", "config.json is damaged", "step-000001-train.parquet"):
        assert name in problems
