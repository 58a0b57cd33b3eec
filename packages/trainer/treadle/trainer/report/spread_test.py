import pytest

from treadle.agent_loop import ToolError, Trajectory
from treadle.tracing import Metric
from treadle.trainer.report import rollout_metrics
from treadle.trainer.report.spread import spread_metrics
from treadle.trainer.report.testing import make_task, make_trajectory


def timed(generate_s: float, tool_calls_s: float | None, *, calls_tool: bool = True) -> Trajectory:
    metrics = [Metric("agent_loop/generate_s", generate_s)]
    if tool_calls_s is not None:
        metrics.append(Metric("agent_loop/tool_calls_s", tool_calls_s))
    return make_trajectory(calls_tool=calls_tool, metrics=metrics)


def test_least_and_greatest_of_each_number() -> None:
    metrics = spread_metrics([timed(1.0, 4.0), timed(3.0, None, calls_tool=False)])
    assert (metrics["agent_loop/generate_min_s"], metrics["agent_loop/generate_max_s"]) == (1, 3)
    assert (metrics["agent_loop/tool_calls_min_s"], metrics["agent_loop/tool_calls_max_s"]) == (
        4,
        4,
    )
    assert (metrics["rollout/turns_min"], metrics["rollout/turns_max"]) == (2, 4)
    assert (metrics["rollout/response_tokens_min"], metrics["rollout/response_tokens_max"]) == (
        2,
        10,
    )
    assert metrics["rollout/prompt_tokens_max"] == 4


def test_the_slowest_is_slow_in_completions_and_tools_together() -> None:
    metrics = spread_metrics([timed(3.0, None, calls_tool=False), timed(1.0, 4.0)])
    slowest = {
        name.removeprefix("agent_loop/slowest/"): value
        for name, value in metrics.items()
        if name.startswith("agent_loop/slowest/")
    }
    assert slowest == {
        "generate_s": 1.0,
        "tool_calls_s": 4.0,
        "prompt_tokens": 4.0,
        "response_tokens": 10.0,
    }


def test_a_loop_that_measures_no_time_has_no_slowest() -> None:
    metrics = spread_metrics([make_trajectory()])
    assert metrics["rollout/turns_max"] == 4
    assert not [name for name in metrics if name.startswith("agent_loop/")]
    assert spread_metrics([]) == {}


def test_the_metrics_of_a_step_leave_failed_trajectories_out_of_the_spread() -> None:
    failed = Trajectory.failed(make_task(), ToolError("down"))
    metrics = rollout_metrics([timed(2.0, 0.5), failed])
    assert metrics["rollout/turns_min"] == pytest.approx(4)
    assert metrics["agent_loop/generate_max_s"] == metrics["agent_loop/generate_s"] == 2.0
