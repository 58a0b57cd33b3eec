"""The fakes keep the contract of the real thing."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from treadle.agent_loop import Message, RequestContext, SamplingParams
from treadle.agent_loop.testing import (
    ByteRenderer,
    EchoGenerator,
    FakeClock,
    ScriptedGenerator,
    ScriptedTool,
)
from treadle.agent_loop.testing.byte_renderer import decode
from treadle.agent_loop.testing.generator_contract import GeneratorContract, GeneratorSubject

pytestmark = pytest.mark.asyncio

REQUEST = RequestContext(request_id="r", session_id="s", deadline=math.inf)
PARAMS = SamplingParams(max_tokens=50)


class TestScriptedGenerator(GeneratorContract):
    @asynccontextmanager
    async def subject(self) -> AsyncIterator[GeneratorSubject]:
        generator = ScriptedGenerator(
            [tuple(range(10, 20))] * 8, weight_version=3, context_length=32
        )
        yield GeneratorSubject(
            generator=generator,
            prompt=(1, 2, 3),
            long_prompt=(1,) * 32,
            vocab_size=20,
            weight_version=3,
            hold=generator.hold,
            release=generator.release,
            until_running=generator.until_running,
            until_idle=generator.until_idle,
        )


async def test_a_request_that_the_script_does_not_foresee_fails() -> None:
    with pytest.raises(AssertionError, match="no reply left for request 1"):
        await ScriptedGenerator().generate([1], PARAMS, request=REQUEST)


async def test_an_echo_repeats_the_last_message() -> None:
    prompt = ByteRenderer().render([Message(role="user", content="Grüße")], tools=()).ids
    completion = await EchoGenerator().generate(prompt, PARAMS, request=REQUEST)
    assert decode(completion.token_ids) == "Grüße<end>"


async def test_a_clock_wakes_who_is_due_in_order() -> None:
    clock, woken = FakeClock(), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with asyncio.TaskGroup() as group:
        for seconds in (3.0, 1.0, 2.0):
            group.create_task(sleeper(seconds))
        await clock.until_sleeping(3)
        await clock.advance(2.0)
        assert woken == [1.0, 2.0]
        assert clock.now() == 2.0
        await clock.advance(1.0)
    assert woken == [1.0, 2.0, 3.0]


async def test_a_session_is_closed_once_and_not_called_afterwards() -> None:
    tool = ScriptedTool(results=["a"])
    session = await tool.open(None)  # type: ignore[arg-type]
    await session.aclose()
    with pytest.raises(AssertionError, match="called after aclose"):
        await session.call({})
    with pytest.raises(AssertionError, match="closed twice"):
        await session.aclose()


async def test_the_byte_renderer_closes_a_cut_turn() -> None:
    renderer = ByteRenderer()
    answer = [Message(role="user", content="go on")]
    assert (
        decode(renderer.extend((65,), answer, tools=()).ids) == "<end><user>go on<end><assistant>"
    )
    assert decode(renderer.extend((256,), answer, tools=()).ids) == "<user>go on<end><assistant>"
