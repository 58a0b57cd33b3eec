import json
from pathlib import Path

import pytest
from compare_runs import differences, main

STEP = {"step": 1, "reward/mean": 0.5, "rollout/kl": 1e-9, "time/step_s": 2.0, "tool/calls": 3.0}


def status(tmp_path: Path, first: list[dict[str, float]], second: list[dict[str, float]]) -> int:
    runs = [tmp_path / "first", tmp_path / "second"]
    for run, lines in zip(runs, (first, second), strict=True):
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return main([str(run) for run in runs])


@pytest.mark.parametrize(
    "other",
    [
        {"time/step_s": 3.0},
        {"agent_loop/generate_s": 0.1},
        {"agent_loop/slowest/response_tokens": 12.0},
        {"rollout/kl": 2e-9},
        {"rollout/logprob_diff_max": 1e-6},
        {"servers/time_share/decode": 0.5, "servers/busy_min": 0.5},
    ],
)
def test_wall_times_and_what_depends_on_batching_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, float]
) -> None:
    assert status(tmp_path, [STEP], [STEP | other]) == 0
    assert capsys.readouterr().out == "1 lines and 3 metrics are equal\n"


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"reward/mean": 0.5000000000000001}, "reward/mean: 0.5 and 0.5000000000000001"),
        ({"tool/calls": 3}, "tool/calls: 3.0 and 3"),
        ({"sequences/trained": 8}, "sequences/trained: missing and 8"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    other: dict[str, float],
    difference: str,
) -> None:
    second = [STEP, STEP | other, STEP | {"reward/mean": 0.0}]
    assert status(tmp_path, [STEP, STEP, STEP], second) == 1
    assert capsys.readouterr().out == f"line 2, {difference}\n"


def test_a_run_that_ended_early_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(tmp_path, [STEP, STEP], [STEP]) == 1
    assert capsys.readouterr().out == "number of lines: 2 and 1\n"


def test_further_metrics_can_be_left_out(tmp_path: Path) -> None:
    status(tmp_path, [STEP], [STEP | {"servers/lost": 1.0, "reward/mean": 0.0}])
    runs = tmp_path / "first", tmp_path / "second"
    assert list(differences(*runs, leave_out=("servers/", "reward/"))) == []
    (found,) = differences(*runs, leave_out=("servers/",))
    assert found == "line 1, reward/mean: 0.5 and 0.0"
