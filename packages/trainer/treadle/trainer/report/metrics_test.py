import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.trainer.report import MetricsLog, read_metrics
from treadle.trainer.report.seals import SEALS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def write(path: Path, *steps: int, resume_after: int | None = None) -> None:
    with MetricsLog(path, resume_after=resume_after) as log:
        for step in steps:
            log.append(step, {"reward/mean": step / 10})


def steps_of(path: Path) -> list[float]:
    return [record["step"] for record in read_metrics(path)]


def test_a_line_is_on_the_disk_when_append_returns(path: Path) -> None:
    with MetricsLog(path) as log:
        assert log.last_step == -1
        log.append(0, {"val/reward": 0.5})
        log.append(1, {"reward/mean": 0.25, "tokens/sampled": 12.0})
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"step": 0, "val/reward": 0.5},
            {"step": 1, "reward/mean": 0.25, "tokens/sampled": 12.0},
        ]
        assert log.last_step == 1


def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(path: Path) -> None:
    with MetricsLog(path) as log:
        log.append(1, {"loss": math.nan, "ratio": math.inf})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "ratio": None}
    (record,) = read_metrics(path)
    assert math.isnan(record["loss"])
    assert math.isnan(record["ratio"])


def test_steps_grow(path: Path) -> None:
    with MetricsLog(path) as log:
        log.append(2, {})
        with pytest.raises(ValueError, match="step 2 comes after step 2"):
            log.append(2, {})


def test_a_resumed_run_removes_what_comes_again(path: Path) -> None:
    write(path, 0, 1, 2, 3, 4)
    write(path, 3, 4, 5, resume_after=2)
    assert steps_of(path) == [0, 1, 2, 3, 4, 5]
    write(path, 7, resume_after=-1)
    assert steps_of(path) == [7]
    names = sorted(child.name for child in path.parent.iterdir())
    assert names == ["metrics.jsonl", "seals.jsonl"]


def test_a_line_that_a_crash_cut_short_is_dropped(path: Path) -> None:
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "rewa')
    assert steps_of(path) == [1, 2]
    write(path, 3, resume_after=2)
    assert steps_of(path) == [1, 2, 3]


def test_a_line_whose_seal_a_crash_left_out_is_sealed_on_resuming(path: Path) -> None:
    write(path, 1, 2)
    seals = path.with_name(SEALS)
    sealed = seals.read_bytes()
    seals.write_bytes(sealed.splitlines(keepends=True)[0])
    write(path, resume_after=2)
    assert seals.read_bytes() == sealed


def test_a_damaged_line_in_the_middle_is_named_and_left_out_on_resuming(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, 1)
    with path.open("ab") as file:
        file.write(b'oops\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(path)
    damaged = path.read_bytes()
    write(path, 4, resume_after=3)
    assert [line["step"] for line in read_metrics(path)] == [1, 3, 4]
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == damaged
    assert "line 2 is damaged" in caplog.text


def test_the_metrics_of_another_run_are_not_written_over(path: Path) -> None:
    write(path, 1)
    with pytest.raises(FileExistsError, match=r"resume it, or choose another run\.dir"):
        MetricsLog(path)


@settings(deadline=None)
@given(
    steps=st.lists(st.integers(0, 50), unique=True, min_size=1).map(sorted),
    cut=st.integers(0, 60),
    resume_after=st.integers(-1, 60),
)
def test_wherever_a_crash_cuts_whole_lines_up_to_the_resumed_step_remain(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int, resume_after: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut" / "metrics.jsonl"
    path.unlink(missing_ok=True)
    write(path, *steps)
    data = path.read_bytes()
    data = data[: max(0, len(data) - cut)]
    path.write_bytes(data)
    whole = steps[: data.count(b"\n")]
    with MetricsLog(path, resume_after=resume_after) as log:
        kept = [step for step in whole if step <= resume_after]
        assert steps_of(path) == kept
        assert log.last_step == (kept[-1] if kept else -1)
