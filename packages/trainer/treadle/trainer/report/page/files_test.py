import io
import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import treadle.trainer.report
from treadle.trainer.report import (
    MetricsLog,
    print_summary,
    rollout_metrics,
    write_page,
    write_reports,
)
from treadle.trainer.report.page.curves import draw_curves, running_mean
from treadle.trainer.report.status import Status, write_status
from treadle.trainer.report.testing import make_task, make_trajectory

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_run_directory_gets_its_picture_and_its_report(tmp_path: Path) -> None:
    trajectories = [
        make_trajectory(reward=1.0),
        make_trajectory(task=make_task(rollout_index=1), reward=0.0, calls_tool=False),
    ]
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        metrics.append(0, {"val/reward": 0.25, "time/validate_s": 1.0})
        for step in range(1, 5):
            times = {"time/rollout_s": 1.0, "time/train_s": 0.5, "time/step_s": 2.0}
            metrics.append(step, {**rollout_metrics(trajectories), **times, "val/reward": 0.75})
    (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "unlikely-name"}}))
    (tmp_path / "notes.jsonl").write_text('{"step": 2, "note": "no group has signal"}\n')
    summary = write_reports(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "unlikely-name" in page
    assert "no group has signal" in page
    out = io.StringIO()
    print_summary(summary, tmp_path, console=Console(file=out, width=200))
    assert "held-out reward" in out.getvalue()
    assert "0.250" in out.getvalue()
    assert "0.750" in out.getvalue()
    assert str(tmp_path) in out.getvalue()


def test_a_run_that_ended_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="failed", error="DataError: no rows"))
    assert write_reports(tmp_path).num_steps == 0
    assert "DataError: no rows" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_a_damaged_record_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("no json\n")
    with pytest.raises(ValueError, match=f"{name}.* damaged"):
        write_reports(tmp_path)


def test_curves_are_drawn_of_whatever_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    for records in (
        [],
        [{"step": 1.0, "reward/mean": math.nan}],
        [{"step": 1.0, "reward/mean": -3.5, "time/step_s": 0.0, "time/rollout_s": 0.0}],
        [{"step": float(s), "time/step_s": 2.0, "time/rollout_s": 1.0} for s in range(1, 60)],
    ):
        draw_curves(records, path, title="Few & odd $numbers$")
        assert path.read_bytes().startswith(PNG)


def test_the_running_mean_looks_back_only() -> None:
    assert running_mean([1.0, 2.0, 6.0, 0.0], 2) == [1.0, 1.5, 4.0, 3.0]
    assert running_mean([], 3) == []


def test_the_public_names_are_sorted_and_loading_them_is_cheap() -> None:
    names = treadle.trainer.report.__all__
    assert names == sorted(names)
    script = (
        "import sys, treadle.trainer.report, treadle.trainer.data\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'duckdb', 'rich', 'pyarrow', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_full_disk_keeps_no_half_of_a_file(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        metrics.append(1, {"reward/mean": 0.5})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_reports(tmp_path)
        with pytest.raises(OSError, match="File too large"):
            write_page(tmp_path, tmp_path / "report.html")
        with pytest.raises(OSError, match="File too large"):
            write_status(tmp_path, Status(state="failed", error="why " * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "seals.jsonl"}
