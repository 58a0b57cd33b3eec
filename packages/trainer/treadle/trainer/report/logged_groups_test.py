import json
from pathlib import Path

import pytest

from treadle.trainer.report import TrajectoryLog
from treadle.trainer.report.logged_groups import read_groups, thin_out
from treadle.trainer.report.testing import make_task, make_trajectory

LINE = {"rollout_index": 0, "stop": "finished", "messages": []}
"""What every line has, beside what the index reads."""


def write_log(path: Path, *, steps: int, size: int) -> None:
    with TrajectoryLog(path) as log:
        for step in range(steps):
            tasks = [make_task(f'row "{step}"', rollout_index=index) for index in range(size)]
            group = [make_trajectory(task=task) for task in tasks]
            log.append(step, group, phase="train", limit=size)
            log.append(step, [make_trajectory()], phase="val", limit=1)


def test_whole_groups_are_read_back(tmp_path: Path) -> None:
    write_log(tmp_path / "t.jsonl", steps=2, size=3)
    logged = read_groups(tmp_path / "t.jsonl", max_trajectories=100)
    assert [(g.step, g.phase, g.task_id, len(g.lines)) for g in logged.groups] == [
        (0, "train", 'row "0"', 3),
        (0, "val", "train/0", 1),
        (1, "train", 'row "1"', 3),
        (1, "val", "train/0", 1),
    ]
    assert (logged.num_groups, logged.num_trajectories) == (4, 8)
    assert logged.groups[0].lines[2]["rollout_index"] == 2


@pytest.mark.parametrize("limit", [1, 2, 9, 20, 30])
def test_of_many_some_are_chosen_over_the_whole_run(tmp_path: Path, limit: int) -> None:
    write_log(tmp_path / "t.jsonl", steps=30, size=4)
    logged = read_groups(tmp_path / "t.jsonl", max_trajectories=limit)
    train = [group for group in logged.groups if group.phase == "train"]
    assert train[-1].step == 29
    assert all(len(group.lines) == min(limit, 4) for group in train)
    if limit >= 20:
        assert sum(len(group.lines) for group in logged.groups) <= limit
        assert train[0].step == 0
        assert any(group.phase == "val" for group in logged.groups)
    assert logged.num_trajectories == 150


def test_a_line_being_written_and_lines_in_another_order_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = {"task_id": "a", "phase": "train", "step": 1, **LINE}
    path.write_text(json.dumps(line) + "\n" + json.dumps(line)[:9])
    (group,) = read_groups(path, max_trajectories=5).groups
    assert group.lines == ({**line, "samples": []},)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"messages": None}, "messages: Input should be a valid list"),
        ({"samples": [{"ids": [0]}]}, "samples.0.spans: Field required"),
        ({"reward": 10**320}, "reward: "),
        ({"trace": [{"name": "x"}]}, "trace.0.start_unix_ns: Field required"),
    ],
)
def test_a_line_of_another_shape_is_named_with_its_field(
    tmp_path: Path, damage: dict[str, object], text: str
) -> None:
    path = tmp_path / "t.jsonl"
    line = {"task_id": "a", "phase": "train", "step": 1, **LINE, **damage}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"byte 0 is damaged: {text}"):
        read_groups(path, max_trajectories=5)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"step": 1, "phase": "train", "task_id": "a", oops\n')
    with pytest.raises(ValueError, match=r"t\.jsonl, the line at byte 0 is damaged"):
        read_groups(path, max_trajectories=5)


def test_many_are_thinned_out_evenly() -> None:
    many = range(1000)
    assert thin_out(many, 10) == [0, 111, 222, 333, 444, 555, 666, 777, 888, 999]
    assert thin_out(many[:10], 10) == list(range(10))
    assert (thin_out(many, 1), thin_out(many, 0)) == ([999], [])
