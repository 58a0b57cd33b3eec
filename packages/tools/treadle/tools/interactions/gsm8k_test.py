from collections.abc import Mapping

import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    SetupError,
    StopReason,
    ToolAgentLoop,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.tools.interactions import Gsm8kInteraction


def make_task(extra: Mapping[str, object]) -> AgentTask:
    return AgentTask(
        task_id="train/7",
        sample_index=7,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="How many?"),),
        fields={"extra_info": {"interaction_kwargs": extra}},
    )


TASK = make_task({"name": "gsm8k", "query": "How many?", "ground_truth": "42"})


@pytest.mark.asyncio
async def test_the_model_is_asked_again_until_it_is_right() -> None:
    services = Services(
        generator=ScriptedGenerator(["#### 41", "#### 42"]),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=1000),
        sampling=SamplingParams(max_tokens=100),
        interactions={"gsm8k": Gsm8kInteraction()},
    )
    trajectory = await ToolAgentLoop().run(TASK, services)
    assert trajectory.stop is StopReason.FINISHED
    assert trajectory.turn_scores == (0.0, 1.0)
    assert [m.content for m in trajectory.messages[1:]] == [
        "#### 41",
        "Your response is incorrect! You need to reflect on your answer and try again.",
        "#### 42",
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("mode", "text", "score"),
    [
        ("strict", "42", 0.0),
        ("flexible", "42", 1.0),
        ("strict", "####42", 0.0),
        ("fixed", "####42", 1.0),
    ],
)
async def test_the_answer_is_read_in_the_mode_of_the_reward(
    mode: str, text: str, score: float
) -> None:
    session = await Gsm8kInteraction(config={"mode": mode}).open(TASK)
    reply = await session.respond([*TASK.messages, Message(role="assistant", content=text)])
    assert (reply.score, reply.stop) == (score, bool(score))


@pytest.mark.asyncio
async def test_a_row_without_a_ground_truth_is_refused() -> None:
    with pytest.raises(SetupError, match=r"interaction_kwargs\.ground_truth of its row, found Non"):
        await Gsm8kInteraction().open(make_task({"name": "gsm8k"}))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"mode": "strikt"}, r"mode is 'strikt', did you mean 'strict'\?; known are: strict, fl"),
        ({"method": "strict"}, r"has no setting \['method'\]; it has: mode"),
    ],
)
def test_unknown_settings_are_refused(config: Mapping[str, object], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        Gsm8kInteraction(config=config)
