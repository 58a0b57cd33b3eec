"""Both loops against the scripted generator, and their trajectories as a training batch."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from multi_trajectory.compaction import ASK, CompactingAgent
from multi_trajectory.delegation import DelegatingAgent
from treadle.agent_loop import (
    AgentLoop,
    AgentTask,
    Drop,
    LoopLimits,
    LoopRegistry,
    Message,
    Origin,
    RolloutRunner,
    SamplingParams,
    Services,
    StopReason,
    ToolResult,
    Trajectory,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator, ScriptedTool
from treadle.agent_loop.testing.byte_renderer import decode
from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.trainer.training_loop.groups import groups_of, make_batch

QUESTION = Message(role="user", content="How far is it?")


def call(name: str, **arguments: str) -> str:
    pairs = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{pairs}}}}}\n</tool_call>'


def services(generator: ScriptedGenerator, tool: ScriptedTool, **limits: int) -> Services:
    return Services(
        generator=generator,
        renderer=ByteRenderer(),
        limits=replace(LoopLimits(max_response_tokens=2000), **limits),  # type: ignore[arg-type]
        sampling=SamplingParams(max_tokens=500),
        tools={"lookup": tool},
        reward=lambda trajectory: float("42" in trajectory.final_text),
    )


def attempt(loop: AgentLoop, kit: Services, rollout_index: int = 0) -> Trajectory:
    """Runs the loop as a run would: with deadline, watchdog and reward."""
    delivered: list[Trajectory] = []

    async def sink(trajectory: Trajectory) -> None:
        delivered.append(trajectory)

    task = AgentTask(
        task_id="row-0",
        sample_index=0,
        rollout_index=rollout_index,
        loop="it",
        messages=(QUESTION,),
        seed=rollout_index,
    )
    runner = RolloutRunner(
        LoopRegistry({"it": loop}), kit, max_in_flight=1, deadline_s=60.0, failure_policy=Drop()
    )
    asyncio.run(runner.run([task], sink))
    (trajectory,) = delivered
    assert trajectory.error is None, trajectory.error
    return trajectory


def said(trajectory: Trajectory) -> list[str]:
    return [
        decode(sample.ids[span.start : span.stop])
        for sample in trajectory.samples
        for span in sample.spans
        if span.origin is Origin.SAMPLED
    ]


def test_helpers_work_at_the_same_time_and_are_samples_of_the_trajectory() -> None:
    both = call("delegate", question="to the lake?") + call("delegate", question="and back?")
    generator = ScriptedGenerator([both, call("lookup"), "20", "22", "It is 42."])
    kit = services(generator, ScriptedTool(results=["twenty"]), max_parallel_calls=2)
    trajectory = attempt(DelegatingAgent(), kit)
    first, second, whole = trajectory.samples
    assert decode(first.prompt_ids).endswith("<user>to the lake?<end><assistant>")
    assert decode(second.prompt_ids).endswith("<user>and back?<end><assistant>")
    assert decode(whole.prompt_ids).endswith("<user>How far is it?<end><assistant>")
    answers = [message.content for message in trajectory.messages if message.role == "tool"]
    assert sorted(answers) == ["20", "22"]
    assert (trajectory.stop, trajectory.reward) == (StopReason.FINISHED, 1.0)
    assert sorted(said(trajectory)) == sorted(
        text + "<end>" for text in (both, call("lookup"), "20", "22", "It is 42.")
    )
    assert len({request.context.session_id for request in generator.requests}) == 3
    assert len({request.params.seed for request in generator.requests}) == 5


def test_a_helper_that_is_asked_nothing_is_not_begun() -> None:
    generator = ScriptedGenerator([call("delegate", task="?"), "Hm."])
    trajectory = attempt(DelegatingAgent(), services(generator, ScriptedTool()))
    assert "give the helper a question" in trajectory.messages[2].content
    assert len(trajectory.samples) == 1


@pytest.mark.parametrize("num_full", [1, 3])
def test_a_full_context_goes_on_with_notes(num_full: int) -> None:
    filling = [call("lookup"), call("lookup"), "so far: 40"] * num_full
    generator = ScriptedGenerator([*filling, "It is 42."])
    tool = ScriptedTool(results=["x" * 200] * 2 * num_full)
    kit = services(generator, tool, max_response_tokens=1000)
    trajectory = attempt(CompactingAgent(reserve=500), kit)
    assert (trajectory.stop, trajectory.reward) == (StopReason.FINISHED, 1.0)
    assert len(trajectory.samples) == num_full + 1
    assert said(trajectory) == [text + "<end>" for text in (*filling, "It is 42.")]
    for sample in trajectory.samples[:-1]:
        assert ASK in decode(sample.response_ids)
        assert len(sample.response_ids) <= 1000
    begun = trajectory.messages[0].content
    assert begun.startswith(
        "How far is it?\n\nYour notes so far:\nso far: 40\n\nThe latest results"
    )
    assert begun.endswith("x" * 200)
    assert (tool.num_opened, tool.num_closed) == (1, 1)
    assert trajectory.assistant_turns == 3 * num_full + 1


def test_a_tool_can_end_it() -> None:
    tool = ScriptedTool(results=[ToolResult(content="over", stop=True, reward=0.5)])
    kit = services(ScriptedGenerator([call("lookup")]), tool)
    trajectory = attempt(CompactingAgent(), kit)
    assert (trajectory.stop, trajectory.tool_rewards) == (StopReason.TOOL_STOP, (0.5,))


def test_a_context_is_not_compacted_for_ever() -> None:
    generator = ScriptedGenerator([call("lookup"), call("lookup"), "notes"] * 9)
    kit = services(generator, ScriptedTool(results=["x" * 200] * 20), max_response_tokens=1000)
    trajectory = attempt(CompactingAgent(reserve=500, max_compactions=2), kit)
    assert trajectory.stop is StopReason.RESPONSE_LENGTH
    assert len(trajectory.samples) == 3


def advantages(trajectories: Sequence[Trajectory]) -> list[tuple[int | None, object]]:
    estimator = find_estimator(AlgorithmConfig(advantage="dr_grpo"))
    batch = make_batch(groups_of(trajectories), estimator, version=0)
    return [(s.trajectory, s.advantages) for s in batch.sequences]


def test_all_samples_are_trained_on_with_the_advantage_of_the_whole() -> None:
    filling = [call("lookup"), call("lookup"), "so far: 40"]
    scripts = ([*filling, "It is 42."], ["It is 41."])
    members = [
        attempt(
            CompactingAgent(reserve=500),
            services(
                ScriptedGenerator(script),
                ScriptedTool(results=["x" * 200] * 2),
                max_response_tokens=1000,
            ),
            rollout_index,
        )
        for rollout_index, script in enumerate(scripts)
    ]
    assert advantages(members) == [(0, 0.5), (0, 0.5), (None, -0.5)]
