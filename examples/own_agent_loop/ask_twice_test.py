"""The loop against the scripted generator: no server, no model, no tokenizer."""

import asyncio

from own_agent_loop.ask_twice import AskTwice
from treadle.agent_loop import AgentTask, LoopLimits, Message, SamplingParams, Services
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator


def test_the_second_answer_counts() -> None:
    services = Services(
        generator=ScriptedGenerator(["It is 41.", "It is 42."]),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=100),
        sampling=SamplingParams(max_tokens=50),
    )
    question = Message(role="user", content="What is 6 * 7?")
    task = AgentTask(
        task_id="row-0", sample_index=0, rollout_index=0, loop="ask_twice", messages=(question,)
    )

    trajectory = asyncio.run(AskTwice().run(task, services))

    assert trajectory.final_text == "It is 42."
    assert trajectory.tokens.num_sampled_tokens == 2 * len("It is 42.") + 2  # and two end marks
