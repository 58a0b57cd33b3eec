import json
import unicodedata
from pathlib import Path

import pytest

from treadle.tracing.trajectories.run_directories import NotARunError
from treadle.tracing.trajectories.testing import make_row
from treadle.tracing.viewer.text import conversation, curves

_EVIL = "\x1b]0;title\x07[bold]x[/bold]\u202egnp.exe\u200b\x9b2J"


def test_runs_are_compared_metric_by_metric(tmp_path: Path) -> None:
    for name, slope in (("a", 1.0), ("b", -1.0)):
        (tmp_path / name).mkdir()
        lines = [{"step": step, "reward/mean": step * slope} for step in range(1, 5)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(f'{text}nonsense\n{{"step": 9, "c": nul')
    (tmp_path / "a" / "alerts.jsonl").write_text(f"{_EVIL}\n")
    head, first, second, alert = curves([tmp_path / "b", tmp_path / "a"]).splitlines()
    assert head.split() == ["metric", "run", "first", "last", "least", "most", "by", "step"]
    assert first.split() == ["reward/mean", "a", "1", "4", "1", "4", "▁▃▆█"]
    assert second.split() == ["reward/mean", "b", "-1", "-4", "-4", "-1", "█▆▃▁"]
    assert alert.startswith("a: \\x1b]0;title")
    with pytest.raises(NotARunError, match="is not a run directory"):
        curves([tmp_path])


def test_a_long_series_is_drawn_by_means(tmp_path: Path) -> None:
    lines = (json.dumps({"step": step, "x": step}) for step in range(1000))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    bars = curves([tmp_path]).split()[-1]
    assert len(bars) == 40
    assert "".join(sorted(bars)) == bars


def test_a_trajectory_is_a_conversation() -> None:
    text = conversation(make_row(1, "train", 0, 1))
    assert "step 1  train  train/0  rollout 1\n" in text
    assert "[user]" in text
    assert "-> " in text


def test_what_a_model_wrote_is_inert() -> None:
    row = make_row(1, "train", 0, 1)
    messages = [{"role": "assistant", "content": _EVIL, "name": _EVIL}]
    row |= {"messages": json.dumps(messages), "task_id": _EVIL}
    row |= {"error": _EVIL, "traceback": _EVIL, "answer": _EVIL}
    row["findings"] = [{"kind": _EVIL, "text": _EVIL}]
    text = conversation(row)
    assert "[bold]x[/bold]" in text
    assert "\\x1b]0;title\\x07" in text
    assert not {c for c in text if unicodedata.category(c) in {"Cc", "Cf"}} - {"\n"}
