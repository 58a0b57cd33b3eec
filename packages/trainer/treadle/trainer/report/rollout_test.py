from collections.abc import Sequence
from dataclasses import replace

import pytest

from treadle.agent_loop import Finding, StopReason, ToolError, Trajectory
from treadle.tracing import Metric, Reduce
from treadle.trainer.report import rollout_metrics, validation_metrics
from treadle.trainer.report.testing import make_task, make_trajectory


def test_rates_are_shares_of_the_trajectories_that_ended() -> None:
    metrics = rollout_metrics(
        [
            make_trajectory(reward=1.0, calls_tool=True),
            make_trajectory(reward=0.0, calls_tool=False),
            make_trajectory(reward=0.5, calls_tool=True, stop=StopReason.RESPONSE_LENGTH),
            Trajectory.failed(make_task(), ToolError("sandbox down")),
        ]
    )
    assert metrics["rollout/num_trajectories"] == 4
    assert metrics["rollout/num_failed"] == 1
    assert (metrics["reward/mean"], metrics["reward/min"], metrics["reward/max"]) == (0.5, 0, 1)
    assert metrics["tool/call_rate"] == pytest.approx(2 / 3)
    assert metrics["stop/finished"] == pytest.approx(2 / 3)
    assert metrics["stop/response_length"] == pytest.approx(1 / 3)
    assert metrics["rollout/turns"] == pytest.approx((4 + 2 + 4) / 3)


def test_tokens_are_counted_by_who_wrote_them() -> None:
    metrics = rollout_metrics([make_trajectory(calls_tool=True), make_trajectory(calls_tool=False)])
    assert metrics["tokens/prompt"] == 4 + 4
    assert metrics["tokens/sampled"] == (3 + 2) + 2
    assert metrics["tokens/observed"] == 5
    assert metrics["rollout/response_tokens"] == (10 + 2) / 2


def test_what_loops_and_tools_report_is_combined_by_its_own_rule() -> None:
    report = (Metric("tool/calls", 2.0, Reduce.SUM), Metric("agent_loop/generate_s", 3.0))
    metrics = rollout_metrics([make_trajectory(metrics=report), make_trajectory(metrics=report)])
    assert metrics["tool/calls"] == 4.0
    assert metrics["agent_loop/generate_s"] == 3.0


def test_a_number_without_a_trajectory_to_take_it_from_is_absent() -> None:
    failed = rollout_metrics([Trajectory.failed(make_task(), ToolError("down"))])
    assert failed["rollout/num_failed"] == 1
    assert "reward/mean" not in failed
    assert "tool/call_rate" not in failed
    assert "reward/mean" not in rollout_metrics([make_trajectory(reward=None)])


def test_validation_counts_a_failed_trajectory_as_wrong() -> None:
    metrics = validation_metrics(
        [
            make_trajectory(reward=1.0, calls_tool=True),
            Trajectory.failed(make_task("val/1"), ToolError("down")),
        ]
    )
    assert metrics == {
        "val/reward": 0.5,
        "val/accuracy": 0.5,
        "val/tool_call_rate": 0.5,
        "val/num_trajectories": 2,
        "val/num_failed": 1,
    }


@pytest.mark.parametrize(
    ("rewards", "right", "accuracy"),
    [
        ((1.0, 0.0), (None, None), 0.5),
        ((0.5, 0.0), (None, None), None),
        ((-1.0, 1.0), (None, None), None),
        ((-1.0, 0.9), (0.0, 1.0), 0.5),
        ((-1.0, 0.9), (0.0, None), None),
    ],
)
def test_accuracy_is_said_only_where_the_reward_tells_right_from_wrong(
    rewards: Sequence[float], right: Sequence[float | None], accuracy: float | None
) -> None:
    trajectories = [
        make_trajectory(reward=r, metrics=[] if a is None else [Metric("reward/acc", a)])
        for r, a in zip(rewards, right, strict=True)
    ]
    metrics = validation_metrics(trajectories)
    assert metrics["val/reward"] == pytest.approx(sum(rewards) / 2)
    assert metrics.get("val/accuracy") == accuracy


def test_a_sum_of_rewards_that_is_0_or_1_is_no_accuracy() -> None:
    summed, right = Metric("rewards/summed", 2.0, Reduce.SUM), Metric("reward/accuracy", 0.0)
    chance = make_trajectory(reward=1.0, metrics=[summed])
    assert "val/accuracy" not in validation_metrics([chance, make_trajectory(reward=0.0)])
    assert validation_metrics([replace(chance, metrics=(summed, right))])["val/accuracy"] == 0.0


def test_each_of_several_data_sources_has_its_validation() -> None:
    task = make_task("val/1")
    other = replace(task, fields={**task.fields, "data_source": "mine"})
    metrics = validation_metrics(
        [make_trajectory(), make_trajectory(task=other, reward=-0.5)],
    )
    assert metrics["val/reward"] == 0.25
    assert metrics["val/reward/treadle/calculator"] == 1.0
    assert metrics["val/accuracy/treadle/calculator"] == 1.0
    assert metrics["val/reward/mine"] == -0.5
    assert "val/accuracy/mine" not in metrics


def test_several_samples_of_a_row_are_scored_together() -> None:
    def sample(row: int, index: int, answer: str | None, reward: float) -> Trajectory:
        task = make_task(f"val/{row}", rollout_index=index)
        return replace(make_trajectory(task=task, reward=reward), answer=answer)

    metrics = validation_metrics(
        [
            sample(0, 0, "42", 1.0),
            sample(0, 1, "42", 1.0),
            sample(1, 0, "41", 0.0),
            Trajectory.failed(make_task("val/1", rollout_index=1), ToolError("down")),
            sample(2, 0, "7", 1.0),
            sample(2, 1, "8", 0.0),
        ]
    )
    of_source = "val/treadle/calculator"
    found = {
        name.removeprefix(of_source + "/"): value
        for name, value in metrics.items()
        if name.startswith(of_source) and "/low" not in name and "/high" not in name
    }
    # Two draws with replacement of row 2: its best is 1 with the probability 3/4.
    best, worst = pytest.approx((1 + 0 + 0.75) / 3), pytest.approx((1 + 0 + 0.25) / 3)
    assert found == {
        **{f"{v}/mean@2": 0.5 for v in ("reward", "accuracy")},
        **{f"{v}/best@2": best for v in ("reward", "accuracy")},
        **{f"{v}/worst@2": worst for v in ("reward", "accuracy")},
        "accuracy/maj@2": pytest.approx(0.5, abs=0.03),
    }
    # Resamplings of the row means 1, 0 and 0.5: all three are the worst row with 1/27 > 2.5%.
    assert metrics[f"{of_source}/reward/mean@2/low"] == 0
    assert metrics[f"{of_source}/reward/mean@2/high"] == 1


def test_one_sample_per_row_adds_no_name() -> None:
    tasks = [make_task(f"val/{row}") for row in range(2)]
    names = validation_metrics([make_trajectory(task=task) for task in tasks])
    assert not [name for name in names if "@" in name]


def test_a_reward_without_answers_has_no_majority() -> None:
    tasks = [make_task("val/0", rollout_index=index) for index in range(2)]
    names = validation_metrics([make_trajectory(task=task) for task in tasks])
    assert [name for name in names if "accuracy/best@2" in name]
    assert not [name for name in names if "maj@" in name]


def test_a_failed_trajectory_is_never_better_than_a_wrong_one() -> None:
    wrong, right = make_trajectory(reward=-1.0), make_trajectory(reward=0.5)
    failed = Trajectory.failed(make_task(), ToolError("down"))
    assert validation_metrics([wrong, right, failed])["val/reward"] == -0.5
    assert validation_metrics([right, failed])["val/reward"] == 0.25
    counts = {"val/num_trajectories": 1.0, "val/num_failed": 1.0}
    assert validation_metrics([failed]) == counts, "nothing says what a wrong one gets"


def test_a_call_in_the_given_messages_is_not_the_models() -> None:
    given = make_trajectory(calls_tool=True)
    task = make_task(messages=given.messages)
    again = Trajectory(
        task=task, samples=given.samples, messages=given.messages, stop=StopReason.FINISHED
    )
    assert rollout_metrics([again])["tool/call_rate"] == 0.0


def test_all_samples_of_a_trajectory_are_counted() -> None:
    one = make_trajectory(calls_tool=True)
    two = replace(one, samples=(*one.samples, *make_trajectory(calls_tool=False).samples))
    metrics = rollout_metrics([one, two])
    assert metrics["rollout/samples"] == 1.5
    assert metrics["tokens/prompt"] == 4 + 4 + 4
    assert metrics["tokens/sampled"] == 5 + 5 + 2
    assert metrics["rollout/response_tokens"] == (10 + 10 + 2) / 2


def test_scores_and_findings_are_summed_up() -> None:
    slow = Finding(kind="stalled", text="task t: nothing for 120 s")
    failed = Trajectory.failed(make_task(), ToolError("down"))
    metrics = rollout_metrics(
        [
            replace(make_trajectory(), tool_rewards=(0.0, -0.05), turn_scores=(0.0, 1.0)),
            replace(make_trajectory(), turn_scores=(1.0,), findings=(slow, slow)),
            replace(failed, findings=(slow,)),
        ]
    )
    assert metrics["reward/tool"] == pytest.approx(-0.025)
    assert metrics["reward/turn"] == pytest.approx(2 / 3)
    assert metrics["findings/stalled"] == 2
    assert "reward/turn" not in rollout_metrics([make_trajectory()])
