import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from treadle.agent_loop import ToolError, Trajectory
from treadle.trainer.report.generation_files import write_generations
from treadle.trainer.report.testing import make_task, make_trajectory


def _decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def test_each_step_has_a_file_with_a_line_per_trajectory(tmp_path: Path) -> None:
    folder = tmp_path / "generations" / "val"
    plain = replace(make_trajectory(calls_tool=False), answer="42")
    failed = Trajectory.failed(make_task(rollout_index=1), ToolError("down"))
    write_generations(folder, 3, [plain], decode=_decode)
    write_generations(folder, 3, [plain, failed], decode=_decode)  # the step runs again
    write_generations(folder, 4, [], decode=_decode)
    assert sorted(path.name for path in folder.iterdir()) == ["3.jsonl", "4.jsonl"]
    one, two = map(json.loads, (folder / "3.jsonl").read_text().splitlines())
    # Four prompt tokens and two sampled ones, which count up from 0.
    assert (one["input"], one["output"]) == ("0 1 2 3", "4 5")
    assert (one["gts"], one["score"], one["step"]) == ("42", 1.0, 3)
    assert (one["accuracy"], one["answer"]) == (1.0, "42")
    assert (two["input"], two["score"], two["accuracy"]) == ("", None, None)
    assert two["error"] == "ToolError: down"
