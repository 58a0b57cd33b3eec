"""The tools and rewards inside the real tool loop and runner, with a scripted model."""

import json
from collections.abc import Sequence

import pytest

from treadle.agent_loop import (
    AgentTask,
    FailFast,
    LoopLimits,
    Message,
    RolloutRunner,
    SamplingParams,
    Services,
    StopReason,
    Tool,
    Trajectory,
    default_loops,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.tools import CalculatorTool, Gsm8kTool, rewards


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def run(tool: Tool, replies: Sequence[str]) -> Trajectory:
    task = AgentTask(
        task_id="train/0",
        sample_index=0,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="What is 6 * 7?"),),
        fields={
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "extra_info": {
                "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}}
            },
        },
    )
    services = Services(
        generator=ScriptedGenerator(replies),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=4000),
        sampling=SamplingParams(max_tokens=1000),
        tools={tool.spec.name: tool},
        reward=rewards.resolve(None),
    )
    runner = RolloutRunner(
        default_loops(), services, max_in_flight=1, deadline_s=120, failure_policy=FailFast()
    )
    ended: list[Trajectory] = []

    async def keep(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    await runner.run([task], keep)
    (trajectory,) = ended
    return trajectory


def observed(trajectory: Trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if message.role == "tool"]


@pytest.mark.asyncio
async def test_the_calculator_answers_and_the_answer_is_rewarded() -> None:
    trajectory = await run(CalculatorTool(), [call("calculator", expression="6*7"), "#### 42"])
    assert observed(trajectory) == ["42"]
    assert trajectory.reward == 1.0
    assert trajectory.stop is StopReason.FINISHED


@pytest.mark.asyncio
async def test_what_the_model_does_wrong_is_an_answer_and_not_an_error() -> None:
    trajectory = await run(
        CalculatorTool(),
        [
            call("calculator", expression="9**9**9"),
            call("calculator", expr="6*7"),
            "I give up.",
        ],
    )
    huge, unnamed = observed(trajectory)
    assert "more than 308 digits" in huge
    assert "takes the argument 'expression'" in unnamed
    assert trajectory.error is None
    assert trajectory.reward == 0.0


@pytest.mark.asyncio
async def test_the_gsm8k_tool_remembers_within_its_trajectory_and_no_further() -> None:
    tool = Gsm8kTool()
    answers = [call("calc_gsm8k_reward", answer=answer) for answer in ("41", "42", "42")]
    for _ in range(2):
        trajectory = await run(tool, [*answers, "#### 42"])
        assert observed(trajectory) == [
            "Current parsed answer='41' reward=0.0",
            "Current parsed answer='42' reward=1.0",
            "Current parsed answer='42' reward=1.0",
        ]
        assert trajectory.tool_rewards == (-0.05, 0.0, -0.05)
        assert trajectory.reward == 1.0
