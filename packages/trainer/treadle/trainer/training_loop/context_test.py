from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from treadle.agent_loop import Finding
from treadle.trainer.report import NotesLog
from treadle.trainer.report.lines import read_lines
from treadle.trainer.report.testing import make_trajectory
from treadle.trainer.training_loop.context import TrainingContext


def test_the_first_finding_of_each_kind_is_shown_once_in_a_run(tmp_path: Path) -> None:
    notes: list[str] = []
    parts: Any = dict.fromkeys(TrainingContext.__dataclass_fields__)
    parts |= {"progress": SimpleNamespace(note=notes.append), "shown_findings": set()}
    parts["notes_log"] = NotesLog(tmp_path / "notes.jsonl")
    context = TrainingContext(**parts)
    stalled = Finding(kind="stalled", text="nothing for 120 s")
    drift = Finding(kind="drift", text="turn 1")
    for step in (1, 2):
        one = replace(make_trajectory(), findings=(stalled, stalled))
        context._note_findings(step, [one, replace(one, findings=(drift, stalled))])
    logged = [line["note"] for line in read_lines(tmp_path / "notes.jsonl")]
    assert [f"step 1: {note}" for note in logged] == notes
    assert notes == [
        "step 1: first stalled of the run, in train/0, rollout 0: nothing for 120 s",
        "step 1: first drift of the run, in train/0, rollout 0: turn 1",
    ]
