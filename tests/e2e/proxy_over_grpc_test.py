"""Black-box agents over OpenAI's client, the capture endpoint, gRPC and rollout servers."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from treadle.agent_loop import (
    AgentTask,
    Drop,
    LoopLimits,
    LoopRegistry,
    Message,
    Origin,
    RequestContext,
    RolloutRunner,
    SamplingParams,
    Services,
    Trajectory,
    derive_seed,
)
from treadle.agent_loop.proxy import AgentSession, ProxyAgentLoop
from treadle.agent_loop.rpc import connect
from treadle.agent_loop.testing import ByteRenderer
from treadle.rollout_server.engine import ModelInfo
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.testing.serving import serve_in_process

pytestmark = pytest.mark.asyncio

MODEL = ModelInfo(architecture="Fake", vocab_size=ByteRenderer.vocab_size, context_length=2048)
SAMPLING = SamplingParams(max_tokens=24, temperature=1.0)
TURNS = 3


async def agent(session: AgentSession) -> None:
    """Talks for some turns; in half of its tasks it forgets what the model said first."""
    messages: list[Any] = [{"role": "user", "content": f"I am {session.task.task_id}."}]
    async with AsyncOpenAI(
        base_url=session.base_url,
        api_key=session.api_key,
        http_client=DefaultAsyncHttpxClient(verify=False),
    ) as client:
        for turn in range(TURNS):
            answer = await client.chat.completions.create(
                model="any", messages=messages, stream=False, logprobs=True
            )
            messages.append(answer.choices[0].message.model_dump())
            messages.append({"role": "user", "content": f"Turn {turn}."})
            if session.task.sample_index % 2 and turn == 1:
                del messages[1:3]


async def test_every_token_is_the_one_that_a_server_sampled_and_trained_once() -> None:
    tasks = [
        AgentTask(
            task_id=f"row-{i}",
            sample_index=i,
            rollout_index=0,
            loop="agent",
            messages=(Message(role="user", content="?"),),
            seed=100 + i,
        )
        for i in range(6)
    ]
    ended: dict[str, Trajectory] = {}

    async def sink(trajectory: Trajectory) -> None:
        ended[trajectory.task.task_id] = trajectory

    async with (
        serve_in_process(FakeEngine(model=MODEL, clock=asyncio.get_running_loop())) as first,
        serve_in_process(FakeEngine(model=MODEL, clock=asyncio.get_running_loop())) as second,
        connect([first.address, second.address]) as generator,
    ):
        services = Services(
            generator=generator,
            renderer=ByteRenderer(),
            limits=LoopLimits(max_response_tokens=1000),
            sampling=SAMPLING,
            reward=lambda trajectory: float(len(trajectory.samples)),
        )
        loops = LoopRegistry({"agent": ProxyAgentLoop(agent)})
        runner = RolloutRunner(
            loops, services, max_in_flight=4, deadline_s=60.0, failure_policy=Drop()
        )
        report = await runner.run(tasks, sink)
        assert (report.num_tasks, report.num_failed) == (6, 0), report.errors
        for task in tasks:
            trajectory = ended[task.task_id]
            assert len(trajectory.samples) == (2 if task.sample_index % 2 else 1)
            assert trajectory.reward == len(trajectory.samples)
            assert trajectory.assistant_turns == TURNS
            sampled = [
                (sample, span)
                for sample in trajectory.samples
                for span in sample.spans
                if span.origin is Origin.SAMPLED
            ]
            assert len(sampled) == TURNS
            for index, (sample, span) in enumerate(sampled):
                params = SamplingParams(
                    max_tokens=SAMPLING.max_tokens,
                    temperature=1.0,
                    stop_token_ids=ByteRenderer.stop_token_ids,
                    seed=derive_seed(100 + task.sample_index, index),
                )
                request = RequestContext(
                    request_id=f"check-{task.task_id}-{index}", session_id="check", deadline=1e18
                )
                again = await generator.generate(sample.ids[: span.start], params, request=request)
                assert again.token_ids == sample.ids[span.start : span.stop]
                logprobs = tuple(p for chunk in again.chunks for p in chunk.logprobs)
                assert logprobs == sample.logprobs[span.start : span.stop]
                assert span.weight_version == again.chunks[0].weight_version
