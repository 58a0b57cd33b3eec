from pathlib import Path

from treadle.trainer.report.notes import AlertLog, NotesLog
from treadle.trainer.report.terminal.lines import read_lines
from treadle.trainer.report.warning_signs import Alert


def test_notes_follow_the_steps_that_a_run_resumes_after(tmp_path: Path) -> None:
    path = tmp_path / "run" / "notes.jsonl"
    log = NotesLog(path)
    for step in (1, 2, 2, 3):
        log.append(step, f"of {step}\n\ud800")
    NotesLog(path, resume_after=2).append(3, "again")
    notes = [(line["step"], line["note"].splitlines()[0]) for line in read_lines(path)]
    assert notes == [(1, "of 1"), (2, "of 2"), (2, "of 2"), (3, "again")]
    NotesLog(path)
    assert not path.exists()


def test_alerts_follow_the_steps_that_a_run_resumes_after(tmp_path: Path) -> None:
    path = tmp_path / "run" / "alerts.jsonl"
    log = AlertLog(path)
    for step in (1, 2, 3):
        log.append(step, Alert("drift", f"of {step}"))
    AlertLog(path, resume_after=1).append(2, Alert("idle", "again"))
    assert list(read_lines(path)) == [
        {"step": 1, "name": "drift", "text": "of 1"},
        {"step": 2, "name": "idle", "text": "again"},
    ]
