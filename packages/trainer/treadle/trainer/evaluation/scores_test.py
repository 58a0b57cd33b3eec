from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import AgentTask, RewardError, Trajectory
from treadle.tracing import Metric
from treadle.trainer.evaluation.scores import mean_over_rows, pass_at_k, score
from treadle.trainer.report import validation_metrics
from treadle.trainer.report.testing import QUESTION, make_trajectory


def task(row: int, sample: int, *, source: str = "math") -> AgentTask:
    return AgentTask(
        task_id=f"val/{row}",
        sample_index=row,
        rollout_index=sample,
        loop="tool_agent",
        messages=(QUESTION,),
        fields={"data_source": source},
    )


def rows(
    *rewards: Sequence[float | None], source: str = "math", first: int = 0
) -> list[Trajectory]:
    """Returns the trajectories of rows with these rewards; None: it failed."""
    return [
        Trajectory.failed(at, RewardError("no"))
        if reward is None
        else make_trajectory(task=at, reward=reward)
        for row, of_row in enumerate(rewards, start=first)
        for sample, reward in enumerate(of_row)
        for at in [task(row, sample, source=source)]
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_success(
    results: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(results)))
    draws = [any(draw) for draw in combinations(results, k)]
    assert pass_at_k(len(results), sum(results), k) == pytest.approx(fmean(draws))


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(
            st.lists(st.sampled_from([0.0, 1.0, None]), min_size=n, max_size=n),
            min_size=1,
            max_size=5,
        )
    )
)
def test_means_are_those_of_a_validation(rewards: list[list[float | None]]) -> None:
    trajectories = rows(*rewards)
    [of_source, every] = score(trajectories)
    metrics = validation_metrics(trajectories)
    assert every.failed == metrics["val/num_failed"]
    if every.failed == len(trajectories):
        assert "val/reward" not in metrics
        return
    assert every.reward.mean == pytest.approx(metrics["val/reward"])
    assert every.tool_call_rate == metrics["val/tool_call_rate"]
    assert (every.accuracy is None) is ("val/accuracy" not in metrics)
    if every.accuracy is not None:
        assert every.accuracy.mean == pytest.approx(metrics["val/accuracy"])
        assert every.pass_at[1] == pytest.approx(metrics["val/accuracy"])
    assert of_source.reward == every.reward


def test_the_standard_error_is_that_of_the_rows() -> None:
    # Row means 0, 1 and 0.5: standard deviation 0.5, over the root of 3.
    estimate = mean_over_rows([[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]])
    assert estimate.mean == 0.5
    assert estimate.standard_error == pytest.approx(0.5 / 3**0.5)
    assert mean_over_rows([[0, 1]]).standard_error is None


def test_each_data_source_has_scores_and_all_rows_come_last() -> None:
    scores = score(rows([1, 1], [0, 1]) + rows([0, None], source="code", first=2))
    assert [each.data_source for each in scores] == ["math", "code", "all"]
    assert [each.rows for each in scores] == [2, 1, 3]
    assert [each.samples for each in scores] == [4, 2, 6]
    assert [each.reward.mean for each in scores] == [0.75, 0, 0.5]
    assert [dict(each.pass_at) for each in scores] == [
        {1: 0.75, 2: 1},
        {1: 0, 2: 0},
        {1: 0.5, 2: pytest.approx(2 / 3)},
    ]
    assert scores[1].failed == 1
    assert scores[1].stops == {"finished": 1}


def test_a_failure_counts_as_the_worst_of_all_rows() -> None:
    scores = score(rows([-2], [1]) + rows([None], source="code", first=2))
    assert scores[1].reward.mean == -2
    assert scores[1].response_tokens is None
    assert scores[1].turns is None


def test_without_a_right_and_wrong_there_is_no_success() -> None:
    [every] = score(rows([0.5, 1]))[-1:]
    assert every.accuracy is None
    assert every.pass_at == {}


def test_the_accuracy_that_a_reward_gives_decides_what_a_success_is() -> None:
    told = [
        make_trajectory(task=task(0, n), reward=-0.5, metrics=[Metric("reward/accuracy", value)])
        for n, value in enumerate([1.0, 0.0])
    ]
    [every] = score(told)[-1:]
    assert every.accuracy is not None
    assert every.accuracy.mean == 0.5
    assert every.pass_at == {1: 0.5, 2: 1}


def test_lengths_are_those_of_the_responses() -> None:
    call = make_trajectory(task=task(0, 0))
    plain = make_trajectory(task=task(1, 0), calls_tool=False)
    lengths = score([call, plain])[-1].response_tokens
    assert lengths is not None
    assert (lengths.mean, lengths.median, lengths.max) == (6, 6, 10)
