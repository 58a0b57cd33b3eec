import json
from pathlib import Path

from treadle.tracing import span
from treadle.trainer.evaluation.group_log import GroupLog
from treadle.trainer.report import TrajectoryLog
from treadle.trainer.report.testing import make_task, make_trajectory


def test_a_group_is_written_when_it_is_whole_with_the_spans_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"

    def attempt(task_id: str, index: int) -> None:
        with span("trajectory", task_id=task_id, rollout_index=index), span("turn"):
            pass
        groups.add(make_trajectory(task=make_task(task_id, rollout_index=index)))

    with TrajectoryLog(path) as log:
        groups = GroupLog(log, samples=2, step=40)
        with groups.recording():
            for task_id, index in (("val/0", 1), ("val/1", 1), ("val/1", 0)):
                attempt(task_id, index)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert [line["task_id"] for line in lines] == ["val/1", "val/1"]
            attempt("val/0", 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["task_id"], line["rollout_index"]) for line in lines] == [
        ("val/1", 0),
        ("val/1", 1),
        ("val/0", 0),
        ("val/0", 1),
    ]
    for line in lines:
        assert (line["step"], line["phase"]) == (40, "val")
        assert [each["name"] for each in line["trace"]] == ["trajectory", "turn"]
