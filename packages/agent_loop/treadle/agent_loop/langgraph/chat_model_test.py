from collections.abc import Iterator, Sequence

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    StopReason,
    ToolCall,
)
from treadle.agent_loop.capture import CapturedSession, LimitReachedError
from treadle.agent_loop.langgraph import ChatModel
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.agent_loop.testing.byte_renderer import decode, encode
from treadle.agent_loop.tokens.renderer import MalformedCall

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BAD = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'


@tool
async def add(a: int) -> int:
    """Add one."""
    return a + 1


def model(
    replies: Sequence[str], *, max_parallel_calls: int = 1, max_response_tokens: int = 1000
) -> tuple[ChatModel, CapturedSession, ScriptedGenerator]:
    generator = ScriptedGenerator(replies, weight_version=3)
    kit = Services(
        generator=generator,
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=max_response_tokens),
        sampling=SamplingParams(max_tokens=1000),
    )
    task = AgentTask(
        task_id="t",
        sample_index=0,
        rollout_index=0,
        loop="x",
        messages=(Message(role="user", content="hi"),),
    )
    session = CapturedSession(task, kit)
    return ChatModel(session=session, max_parallel_calls=max_parallel_calls), session, generator


@pytest.mark.asyncio
async def test_a_message_says_what_was_sampled() -> None:
    chat, session, _ = model(["Hello."])
    message = await chat.ainvoke("hi")
    assert message.content == "Hello."
    prompt = session.samples()[0].num_prompt_tokens
    assert message.usage_metadata == {
        "input_tokens": prompt,
        "output_tokens": 7,
        "total_tokens": prompt + 7,
    }
    assert message.response_metadata == {
        "model_name": "treadle",
        "session_id": session.session_id,
        "finish_reason": "stop",
        "token_ids": [*encode("Hello."), 256],
        "logprobs": [-0.5] * 7,
        "weight_versions": [3],
        "continuation": "root",
    }


@pytest.mark.asyncio
async def test_a_conversation_is_one_sample() -> None:
    chat, session, generator = model([CALL, "It is 2."])
    bound = chat.bind_tools([add])
    history = [HumanMessage("hi")]
    asked = await bound.ainvoke(history)
    (request,) = asked.tool_calls
    assert (request["name"], request["args"]) == ("add", {"a": 1})
    answer = ToolMessage("2", tool_call_id=request["id"])
    said = await bound.ainvoke([*history, asked, answer])
    assert said.response_metadata["continuation"] == "exact"
    (sample,) = session.samples()
    assert decode(sample.response_ids) == f"{CALL}<end><tool>2<end><assistant>It is 2.<end>"
    assert '"description": "Add one."' in decode(generator.requests[0].prompt)


@pytest.mark.asyncio
async def test_calls_are_listed_in_order_with_those_that_cannot_be_read() -> None:
    chat, _, _ = model([BAD + CALL + CALL], max_parallel_calls=2)
    message = await chat.bind_tools([add]).ainvoke("hi")
    assert isinstance(message, AIMessage)
    assert [call["name"] for call in message.tool_calls] == ["add"]
    (bad,) = message.invalid_tool_calls
    assert (bad["name"], bad["args"]) == ("add", BAD)
    assert bad["error"] is not None
    assert bad["error"].startswith("Expecting value")
    kinds = [type(request) for request in chat.requests(message)]
    assert kinds == [MalformedCall, ToolCall]
    assert chat.num_over_cap == 1


@pytest.mark.asyncio
async def test_a_changed_message_has_the_calls_that_it_says() -> None:
    chat, _, _ = model([CALL])
    message = await chat.bind_tools([add]).ainvoke("hi")
    message.tool_calls[0]["args"]["a"] = 5
    (request,) = chat.requests(message)
    assert isinstance(request, ToolCall)
    assert request.arguments == {"a": 5}


@pytest.mark.asyncio
async def test_a_limit_cuts_a_turn_and_then_refuses() -> None:
    chat, session, _ = model(["12345678"], max_response_tokens=4)
    message = await chat.ainvoke("hi")
    assert (message.content, message.response_metadata["finish_reason"]) == ("1234", "length")
    assert not chat.is_closed(message)
    with pytest.raises(LimitReachedError, match="has reached its limit response_length"):
        await chat.ainvoke([HumanMessage("hi"), message, HumanMessage("go on")])
    assert session.finish().stop is StopReason.RESPONSE_LENGTH


@pytest.mark.asyncio
async def test_max_tokens_of_the_model_and_of_a_call() -> None:
    chat, _, generator = model(["a", "b"])
    few = chat.model_copy(update={"max_tokens": 5})
    await few.ainvoke("hi")
    await few.bind(max_tokens=3).ainvoke("hi")
    assert [r.params.max_tokens for r in generator.requests] == [5, 3]


@pytest.mark.asyncio
async def test_a_stop_string_ends_the_turn() -> None:
    chat, _, _ = model(["one. two."])
    message = await chat.ainvoke("hi", stop=["."])
    assert message.content == "one"


@pytest.mark.asyncio
async def test_after_its_end_it_refuses() -> None:
    chat, _, generator = model(["never"])
    chat.end(StopReason.TOOL_STOP)
    chat.end(StopReason.FINISHED)
    with pytest.raises(LimitReachedError, match="has ended: tool_stop"):
        await chat.ainvoke("hi")
    assert generator.requests == []


@pytest.fixture
def global_cache() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


@pytest.mark.asyncio
@pytest.mark.usefixtures("global_cache")
async def test_langchains_cache_is_not_asked() -> None:
    chat, _, generator = model(["a", "b"])
    said = [(await chat.ainvoke("hi")).content for _ in range(2)]
    assert said == ["a", "b"]
    assert len(generator.requests) == 2


@pytest.mark.asyncio
async def test_what_it_does_not_do_it_says() -> None:
    chat, _, _ = model([])
    with pytest.raises(NotImplementedError, match="async only"):
        chat.invoke("hi")
    with pytest.raises(NotImplementedError, match="ask for the format in the prompt"):
        chat.with_structured_output(dict)
    with pytest.raises(ValueError, match="tool_choice is 'any'"):
        chat.bind_tools([add], tool_choice="any")
    with pytest.raises(TypeError, match="not temperature: the run's configuration"):
        await chat.ainvoke("hi", temperature=0.0)
