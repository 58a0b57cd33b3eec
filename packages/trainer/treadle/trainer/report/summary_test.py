import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from treadle.trainer.report.metrics import Record
from treadle.trainer.report.summary import (
    Change,
    format_seconds,
    phase_of,
    summarize,
    summary_rows,
)


def run_of(num_steps: int) -> list[Record]:
    records: list[Record] = [
        {"step": 0, "val/reward": 0.5, "val/accuracy": 0.5, "time/validate_s": 2.0}
    ]
    for step in range(1, num_steps + 1):
        records.append(
            {
                "step": step,
                "reward/mean": step / num_steps,
                "tool/call_rate": 0.5,
                "tokens/sampled": 100.0,
                "tokens/trained": 300.0,
                "time/rollout_s": 2.0,
                "time/train_s": 1.0,
                "time/step_s": 3.5,
            }
        )
    return [*records[:-1], {**records[-1], "val/reward": 0.9, "val/accuracy": 0.9}]


def test_start_and_end_are_means_over_a_window() -> None:
    summary = summarize(run_of(20))
    assert (summary.num_steps, summary.window) == (20, 5)
    assert summary.reward.start == pytest.approx((1 + 2 + 3 + 4 + 5) / 5 / 20)
    assert summary.reward.end == pytest.approx((16 + 17 + 18 + 19 + 20) / 5 / 20)
    assert summary.val_reward == summary.val_accuracy == Change(start=0.5, end=0.9)


def test_in_a_short_run_the_windows_do_not_overlap() -> None:
    assert summarize(run_of(4)).window == 2
    assert summarize(run_of(1)).window == 1
    assert summarize(run_of(1)).reward == Change(start=1.0, end=1.0)


def test_throughput_is_tokens_over_the_seconds_of_their_own_phase() -> None:
    summary = summarize(run_of(10))
    assert summary.rollout_tokens_per_s == pytest.approx(50.0)
    assert summary.train_tokens_per_s == pytest.approx(300.0)


def test_the_phases_and_the_rest_add_up_to_the_whole() -> None:
    summary = summarize(run_of(10))
    assert summary.total_s == pytest.approx(2.0 + 35.0)
    assert summary.phases_s == pytest.approx(
        {"rollout": 20.0, "train": 10.0, "other": 5.0, "validate": 2.0}
    )
    assert list(summary.phases_s) == ["rollout", "train", "other", "validate"]


def test_what_was_not_measured_is_a_dash_and_not_a_zero() -> None:
    records: list[Record] = [{"step": 1, "reward/mean": math.nan}]
    summary = summarize(records)
    assert summary.reward == summary.val_reward == Change(start=None, end=None)
    assert summary.rollout_tokens_per_s is None
    rows = {what: (start, end) for what, start, end in summary_rows(summary, Path("runs/a"))}
    assert rows["held-out reward"] == ("-", "-")
    assert rows["rollout"] == ("", "-")
    assert rows["where it went"] == ("", "-")


def _apart(
    step: int, mean: float, *, stale: float = 0.0, fresh: Mapping[str, float] = {}
) -> Record:
    sizes = {"mean": mean, "p99": 2 * mean, "max": 3 * mean}
    return {
        "step": step,
        **{f"rollout/logprob_diff_{what}": value for what, value in sizes.items()},
        **{f"rollout/logprob_diff_fresh_{what}": value for what, value in fresh.items()},
        "rollout/kl": mean**2,
        "rollout/stale_tokens": stale,
    }


def test_the_mismatch_is_the_worst_tokens_and_the_mean_of_means() -> None:
    summary = summarize([_apart(1, 1e-6), {"step": 2}, _apart(3, 3e-6)])
    assert summary.mismatch is not None
    assert summary.mismatch.mean == pytest.approx(2e-6)
    assert summary.mismatch.max == pytest.approx(9e-6)
    rows = {what: end for what, _, end in summary_rows(summary, Path("runs/a"))}
    assert rows["servers and policy"] == (
        "log-probabilities 2.0e-06 nats apart, p99 6.0e-06, max 9.0e-06; KL 5.0e-12"
    )
    assert rows["rollout servers"] == "none lost"


def test_tokens_of_older_weights_are_left_out_of_the_mismatch() -> None:
    fresh = {"mean": 1e-6, "p99": 2e-6, "max": 3e-6}
    summary = summarize([_apart(1, 0.1, stale=0.25, fresh=fresh)])
    rows = {what: end for what, _, end in summary_rows(summary, Path("runs/a"))}
    assert "max 3.0e-06 without the 25.0% of older weights" in rows["servers and policy"]


def test_servers_that_were_lost_are_counted_over_all_steps() -> None:
    lost: list[Record] = [
        {"step": 1, "servers/lost": 1.0, "servers/restarted": 0.0},
        {"step": 2, "servers/lost": 1.0, "servers/restarted": 1.0},
    ]
    rows = {what: end for what, _, end in summary_rows(summarize(lost), Path("runs/a"))}
    assert rows["rollout servers"] == "2 lost, 1 started again"


def test_a_run_without_a_step_has_a_summary() -> None:
    summary = summarize([])
    assert (summary.num_steps, summary.total_s, dict(summary.phases_s)) == (0, 0.0, {})


def test_the_rows_say_where_the_time_went() -> None:
    rows = {what: end for what, _, end in summary_rows(summarize(run_of(10)), Path("runs/a"))}
    assert rows["where it went"] == "rollout 54% · train 27% · other 14% · validate 5%"
    assert rows["time"] == "37.0 s for 10 steps"
    assert rows["run directory"] == "runs/a"


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("time/rollout_s", "rollout"),
        ("time/step_s", None),
        ("time/rollout", None),
        ("agent_loop/generate_s", None),
    ],
)
def test_phases_are_told_by_their_names(name: str, phase: str | None) -> None:
    assert phase_of(name) == phase


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (185.2, "3 min 05 s"), (7620, "2 h 07 min")],
)
def test_seconds_are_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
