from dataclasses import replace

from treadle.agent_loop import Finding, RewardError, Trajectory
from treadle.trainer.report.testing import make_task, make_trajectory
from treadle.trainer.training_loop.first_of_kind import FirstOfKind


def test_the_first_finding_of_each_kind_is_shown_once_in_a_run() -> None:
    seen = FirstOfKind()
    stalled = Finding(kind="stalled", text="nothing for 120 s")
    drift = Finding(kind="drift", text="turn 1")
    one = replace(make_trajectory(), findings=(stalled, stalled))
    both = [one, replace(one, findings=(drift, stalled))]
    assert list(seen.take(both)) == [
        "first stalled of the run, in train/0, rollout 0: nothing for 120 s",
        "first drift of the run, in train/0, rollout 0: turn 1",
    ]
    assert list(seen.take(both)) == []


def test_a_failure_is_shown_before_the_findings() -> None:
    stalled = Finding(kind="stalled", text="nothing for 120 s")
    failed = Trajectory.failed(make_task(), RewardError("no file"))
    shown = FirstOfKind().take([replace(make_trajectory(), findings=(stalled,)), failed])
    assert next(shown) == "first RewardError of its kind, in train/0, rollout 0: no file"
