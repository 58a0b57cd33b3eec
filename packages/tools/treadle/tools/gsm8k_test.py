import asyncio
from collections.abc import Mapping

import pytest

from treadle.agent_loop import AgentTask, Message, SetupError, ToolResult
from treadle.tools import Gsm8kTool
from treadle.tools.answer_check import AnswerCheckSession


def make_task(extra_info: object) -> AgentTask:
    return AgentTask(
        task_id="train/3",
        sample_index=3,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="How many?"),),
        fields={"extra_info": extra_info},
    )


async def open_session(ground_truth: str = "42") -> AnswerCheckSession:
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": ground_truth}}}
    return await Gsm8kTool().open(make_task({"tools_kwargs": kwargs}))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "content", "reward"),
    [
        ("42", "Current parsed answer='42' reward=1.0", 0.0),
        ("#### 42", "Current parsed answer='#### 42' reward=1.0", 0.0),
        ("It is 42", "Current parsed answer='It is 42' reward=1.0", 0.0),
        ("41", "Current parsed answer='41' reward=0.0", -0.05),
        ("42.", "Current parsed answer='42.' reward=0.0", -0.05),
        (42, "Current parsed answer='42' reward=1.0", 0.0),
        ("none", "Current parsed answer='none' reward=0", -0.05),
    ],
)
async def test_the_first_answer_is_scored_as_verl_does(
    answer: object, content: str, reward: float
) -> None:
    session = await open_session()
    result = await session.call({"answer": answer})
    assert result == ToolResult(content=content, reward=reward)


@pytest.mark.asyncio
async def test_a_missing_answer_is_an_empty_one() -> None:
    session = await open_session()
    result = await session.call({})
    assert (result.content, result.reward) == ("Current parsed answer='' reward=0", -0.05)


@pytest.mark.asyncio
async def test_what_does_not_improve_on_the_previous_call_costs() -> None:
    session = await open_session()
    rewards = [
        (await session.call({"answer": answer})).reward for answer in ("41", "42", "42", "43", "42")
    ]
    assert rewards == [-0.05, 0.0, -0.05, -0.05, 0.0]
    await session.aclose()


@pytest.mark.asyncio
async def test_sessions_share_nothing() -> None:
    first, second = await open_session("1"), await open_session("2")
    await first.call({"answer": "1"})
    assert (await second.call({"answer": "2"})).reward == 0.0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "extra_info",
    [
        None,
        {},
        {"tools_kwargs": None},
        {"tools_kwargs": {"other": {}}},
        {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": 4.2}}}},
    ],
)
async def test_a_row_without_ground_truth_is_an_error_of_ours(
    extra_info: Mapping[str, object] | None,
) -> None:
    with pytest.raises(SetupError, match=r"'train/3'.*calc_gsm8k_reward.create_kwargs.ground_t"):
        await Gsm8kTool().open(make_task(extra_info))


@pytest.mark.asyncio
async def test_calls_that_come_together_are_scored_in_their_order() -> None:
    may_answer = {"7": asyncio.Event(), "42": asyncio.Event()}

    async def check(answer: str, ground_truth: str) -> float:
        await may_answer[answer].wait()
        return float(answer == ground_truth)

    session = AnswerCheckSession(check=check, ground_truth="42")
    calls = [asyncio.create_task(session.call({"answer": said})) for said in ("42", "7", "42")]
    may_answer["7"].set()
    await asyncio.sleep(0)  # the second could overtake the first
    may_answer["42"].set()
    assert [(await call).reward for call in calls] == [0.0, -0.05, 0.0]
