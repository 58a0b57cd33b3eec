import pytest

from treadle.agent_loop import AgentTask, Message, ToolFailure
from treadle.tools import geometry3k
from treadle.tools.geometry3k import Geometry3kTool


def a_task(ground_truth: str) -> AgentTask:
    kwargs = {"calc_geo3k_reward": {"create_kwargs": {"ground_truth": ground_truth}}}
    return AgentTask(
        task_id="r",
        sample_index=0,
        rollout_index=0,
        loop="x",
        messages=(Message(role="user", content="?"),),
        fields={"extra_info": {"tools_kwargs": kwargs}},
    )


@pytest.mark.asyncio
async def test_answers_are_compared_as_mathematics_and_improving_costs_nothing() -> None:
    session = await Geometry3kTool().open(a_task(r"2\sqrt{3}"))
    wrong = await session.call({"answer": "3"})
    assert (wrong.content, wrong.reward) == ("Current parsed answer='3' reward=0.0", -0.05)
    right = await session.call({"answer": r"\sqrt{12}"})
    assert (right.content, right.reward) == (r"Current parsed answer='\\sqrt{12}' reward=1.0", 0.0)
    assert (await session.call({"answer": r"\sqrt{12}"})).reward == -0.05


@pytest.mark.asyncio
async def test_what_takes_for_ever_to_compare_the_model_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(geometry3k, "_TIMEOUT_S", 1.0)
    session = await Geometry3kTool().open(a_task("3"))
    with pytest.raises(ToolFailure, match="too complicated"):
        await session.call({"answer": "9^{9^{9^{9}}}"})
