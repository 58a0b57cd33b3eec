"""Answers that are sent while they are sampled, with OpenAI's own client over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from treadle.agent_loop import (
    AgentTask,
    ChatRenderer,
    Completion,
    EngineFailedError,
    FinishReason,
    LoopLimits,
    Message,
    PlacedImage,
    RequestContext,
    SamplingParams,
    Services,
    TokenChunk,
    Trajectory,
)
from treadle.agent_loop.parsers import parser_named
from treadle.agent_loop.proxy import AgentConstraints, AgentSession, ProxyAgentLoop
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.agent_loop.types import JsonConstraint, Tag, TagConstraint

pytestmark = pytest.mark.asyncio

END = ByteRenderer.stop_token_ids
ASK: dict[str, Any] = {"model": "x", "messages": [{"role": "user", "content": "u"}]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = 'Näh, 2.\n<tool_call>\n{"name": "add", "arguments": {"a": 2.0}}\n</tool_call>'


class SteppedGenerator:
    """Samples one token whenever it is told to; None in the script fails."""

    def __init__(self, ids: Sequence[int | None]) -> None:
        self.ids = ids
        self.steps = asyncio.Semaphore(0)
        self.cancelled = asyncio.Event()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps.release()

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        chunks = []
        try:
            for token in self.ids:
                await self.steps.acquire()
                if token is None:
                    raise EngineFailedError("the engine is gone")
                chunks.append(TokenChunk(token_ids=(token,), logprobs=(-0.5,), weight_version=0))
                assert request.on_tokens is not None
                request.on_tokens(chunks[-1])
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Completion(chunks=tuple(chunks), finish=FinishReason.STOP)

    def finish_session(self, session_id: str) -> None:
        pass


async def run(
    generator: Any,
    script: Callable[[AsyncOpenAI], Awaitable[None]],
    *,
    renderer: ChatRenderer | None = None,
    **options: Any,
) -> Trajectory:
    async def agent(session: AgentSession) -> None:
        async with AsyncOpenAI(
            base_url=session.base_url,
            api_key=session.api_key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=False, trust_env=False),
        ) as client:
            await script(client)

    services = Services(
        generator=generator,
        renderer=renderer or ByteRenderer(),
        limits=LoopLimits(max_response_tokens=2000),
        sampling=SamplingParams(max_tokens=500, temperature=1.0),
    )
    task = AgentTask(
        task_id="t",
        sample_index=0,
        rollout_index=0,
        loop="x",
        messages=(Message(role="user", content="u"),),
    )
    return await ProxyAgentLoop(agent, **options).run(task, services)


async def texts(stream: Any) -> AsyncIterator[str]:
    async for chunk in stream:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            yield text


async def test_1_a_delta_comes_when_its_token_is_sampled_and_characters_are_whole() -> None:
    text = "aä€🙂b"
    generator = SteppedGenerator([*text.encode(), *END])

    async def script(client: AsyncOpenAI) -> None:
        generator.step(2)  # One more than what can be shown, for it might be the last.
        stream = await client.chat.completions.create(**ASK, stream=True)
        came = texts(stream)
        for character, following in zip(text, (*text[1:], ""), strict=True):
            assert await anext(came) == character
            generator.step(len(following.encode()) or 1)
        assert [more async for more in came] == []

    trajectory = await run(generator, script)
    assert trajectory.final_text == text


async def test_2_the_ledger_is_that_of_a_plain_answer() -> None:
    replies = [CALL, "one</s> and more", "", "  spaced  ", "\ufffd?", "<tool_ca", "cut by length"]
    asked: list[dict[str, Any]] = [
        {"tools": TOOLS, "logprobs": True},
        {"stop": ["</s>", "</"], "logprobs": True},
        {},
        {"tools": TOOLS},
        {},
        {"tools": TOOLS},
        {"max_tokens": 5},
    ]
    said: dict[bool, list[tuple[object, ...]]] = {False: [], True: []}

    async def plainly(client: AsyncOpenAI) -> None:
        for more in asked:
            choice = (await client.chat.completions.create(**ASK, **more)).choices[0]
            message, logprobs = choice.message, choice.logprobs and choice.logprobs.content
            calls = [call.to_dict() for call in message.tool_calls or ()]
            said[False].append((message.content or "", calls, choice.finish_reason, logprobs or []))

    async def streaming(client: AsyncOpenAI) -> None:
        for more in asked:
            content, calls, finish, logprobs = "", list[Any](), None, list[Any]()
            async for chunk in await client.chat.completions.create(**ASK, **more, stream=True):
                (choice,) = chunk.choices
                content += choice.delta.content or ""
                calls += [call.to_dict() for call in choice.delta.tool_calls or ()]
                finish = finish or choice.finish_reason
                logprobs += choice.logprobs.content or [] if choice.logprobs else []
            for index, call in enumerate(calls):
                assert call.pop("index") == index
            said[True].append((content, calls, finish, logprobs))

    plain = await run(ScriptedGenerator(replies), plainly)
    streamed = await run(ScriptedGenerator(replies), streaming)
    assert plain.samples == streamed.samples
    assert plain.messages == streamed.messages
    assert said[True] == said[False]
    assert len(said[True]) == len(replies)


async def test_3_a_client_that_leaves_ends_the_sampling_and_leaves_no_trace() -> None:
    generator = SteppedGenerator([*b"abc", *END])

    async def script(client: AsyncOpenAI) -> None:
        generator.step(2)
        stream = await client.chat.completions.create(**ASK, stream=True)
        assert await anext(texts(stream)) == "a"
        await stream.close()
        await generator.cancelled.wait()
        generator.step(4)
        whole = await client.chat.completions.create(**ASK, stream=True)
        assert "".join([text async for text in texts(whole)]) == "abc"

    (sample,) = (await run(generator, script)).samples
    assert sample.num_sampled_tokens == 4


async def test_4_a_failure_before_the_first_token_has_a_status_and_a_later_one_an_event() -> None:
    generator = SteppedGenerator([None])

    async def script(client: AsyncOpenAI) -> None:
        generator.step()
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            await client.chat.completions.create(**ASK, stream=True)
        generator.ids = [*b"ab", None]
        generator.step(3)
        stream = await client.chat.completions.create(**ASK, stream=True)
        came = texts(stream)
        assert await anext(came) == "a"
        with pytest.raises(openai.APIError, match="the engine is gone") as caught:
            await anext(came)
        assert caught.value.code == "engine_failed"
        generator.ids = [*b"ok", *END]
        generator.step(3)
        await (await client.chat.completions.create(**ASK, stream=True)).close()
        generator.step(3)
        final = await client.chat.completions.create(**ASK, stream=True)
        assert "".join([text async for text in texts(final)]) == "ok"

    await run(generator, script)


async def test_5_several_choices_are_samples_with_one_prompt() -> None:
    generator = ScriptedGenerator(["one", "two", "three", "more"])

    async def script(client: AsyncOpenAI) -> None:
        plain = await client.chat.completions.create(**ASK, n=2, seed=7)
        assert [choice.message.content for choice in plain.choices] == ["one", "two"]
        assert [choice.index for choice in plain.choices] == [0, 1]
        assert plain.usage is not None and plain.usage.completion_tokens == 8
        second: Any = plain.choices[1].message.model_dump(exclude_none=True)
        last: Any = {"role": "user", "content": "v"}
        answer = await client.chat.completions.create(
            model="x", messages=[*ASK["messages"], second, last], n=2, stream=True
        )
        got = {0: "", 1: ""}
        async for chunk in answer:
            for choice in chunk.choices:
                got[choice.index] += choice.delta.content or ""
        assert got == {0: "three", 1: "more"}
        with pytest.raises(openai.BadRequestError, match="16 slots"):
            await client.chat.completions.create(**ASK, n=17)

    trajectory = await run(generator, script)
    seeds = [request.params.seed for request in generator.requests]
    assert seeds[0] == 7 and len(set(seeds[:2])) == 2
    decoded = [ByteRenderer().decode(sample.ids) for sample in trajectory.samples]
    first = "<user>u<end><assistant>"
    assert sorted(decoded) == sorted(
        [
            f"{first}one<end>",
            f"{first}two<end><user>v<end><assistant>three<end>",
            f"{first}two<end><user>v<end><assistant>more<end>",
        ]
    )
    assert sum(sample.num_sampled_tokens for sample in trajectory.samples) == 4 + 4 + 6 + 5
    assert {m.name: m.value for m in trajectory.metrics}["capture/choice"] == 2


async def test_6_an_enforced_format_goes_to_the_server_and_its_tokens_are_not_trained_on() -> None:
    generator = ScriptedGenerator(["think", '{"a":1}', "call", "more"])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    async def script(client: AsyncOpenAI) -> None:
        first = await client.chat.completions.create(**ASK)
        messages: list[Any] = [*ASK["messages"], first.choices[0].message.model_dump()]
        messages.append({"role": "user", "content": "As JSON."})
        second = await client.chat.completions.create(
            model="x", messages=messages, response_format=form
        )
        messages.append(second.choices[0].message.model_dump())
        messages.append({"role": "user", "content": "v"})
        await client.chat.completions.create(
            model="x", messages=messages, response_format=form, tools=TOOLS
        )
        await client.responses.create(
            model="x", input="u2", text={"format": {"type": "json_object"}}
        )

    trajectory = await run(generator, script, constraints=AgentConstraints.ENFORCE)
    asked = [request.params.constraint for request in generator.requests]
    assert asked == [
        None,
        JsonConstraint(schema=json.dumps(schema)),
        None,  # With tools, which the model could not call.
        JsonConstraint(schema='{"type": "object"}'),
    ]
    decoded = [
        ByteRenderer().decode([t for t, on in zip(s.ids, s.loss_mask, strict=True) if on])
        for s in trajectory.samples
    ]
    assert decoded == ["think<end>", "call<end>", ""]
    first = ByteRenderer().decode(trajectory.samples[0].ids)
    assert first.endswith('<user>As JSON.<end><assistant>{"a":1}<end>')
    values = {metric.name: metric.value for metric in trajectory.metrics}
    assert values["capture/constrained_tokens"] == 8 + 5
    assert values["capture/all_constrained"] == 0
    assert values["proxy/unenforced_response_format"] == 1


def _tool(name: str, *, strict: bool = True) -> Any:
    parameters = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "strict": strict},
    }


def _tag(name: str, schema: str) -> Tag:
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return Tag(begin=begin, schema=schema, end="}\n</tool_call>")


async def test_7_enforced_calls_go_to_the_server_as_the_models_own_format() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"f": "x"}}\n</tool_call>'
    generator = ScriptedGenerator([call] * 5)
    tools = [_tool("f"), _tool("g", strict=False)]

    async def script(client: AsyncOpenAI) -> None:
        ask = partial(client.chat.completions.create, model="x", messages=ASK["messages"])
        done = await ask(tools=tools)
        calls = done.choices[0].message.tool_calls
        assert calls is not None
        (called,) = calls
        assert isinstance(called, ChatCompletionMessageFunctionToolCall)
        assert json.loads(called.function.arguments) == {"f": "x"}
        await ask(tools=tools[1:], tool_choice="required", parallel_tool_calls=False)
        named: Any = {"type": "function", "function": {"name": "g"}}
        await ask(tools=tools, tool_choice=named)
        flat: Any = [{"type": "function", **tool["function"]} for tool in tools]
        await client.responses.create(
            model="x", input="u", tools=flat, tool_choice={"type": "function", "name": "f"}
        )
        anthropic = {
            "model": "x",
            "max_tokens": 99,
            "messages": ASK["messages"],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
        await client.post("/messages", body=anthropic, cast_to=object)
        named["function"]["name"] = "h"
        with pytest.raises(openai.BadRequestError, match="no tool with the name"):
            await ask(tools=tools, tool_choice=named)

    trajectory = await run(generator, script, constraints=AgentConstraints.ENFORCE)
    schema = json.dumps(tools[0]["function"]["parameters"])
    free = json.dumps({"type": "object"})
    plain = TagConstraint(tags=(_tag("f", schema), _tag("g", free)), trigger="<tool_call>")
    assert [request.params.constraint for request in generator.requests] == [
        plain,
        replace(plain, tags=(_tag("g", free),), required=True, single=True),
        replace(plain, tags=(_tag("g", free),), required=True),
        replace(plain, tags=(_tag("f", schema),), required=True),
        replace(plain, tags=(_tag("f", free),), required=True, single=True),
    ]
    assert not any(any(sample.loss_mask) for sample in trajectory.samples)
    values = {metric.name: metric.value for metric in trajectory.metrics}
    assert values["capture/all_constrained"] == 1
    assert "all_constrained" in {finding.kind for finding in trajectory.findings}
    assert all(values[f"proxy/unenforced_{name}"] == 0 for name in ("strict", "tool_choice"))


async def test_8_a_format_that_cannot_be_enforced_is_sampled_freely_and_counted() -> None:
    generator = ScriptedGenerator(["text"])

    async def script(client: AsyncOpenAI) -> None:
        await client.chat.completions.create(
            **ASK, tools=[_tool("f")], tool_choice="required", parallel_tool_calls=False
        )

    renderer = ByteRenderer(parser_named("qwen3_coder"))
    trajectory = await run(
        generator, script, constraints=AgentConstraints.ENFORCE, renderer=renderer
    )
    assert generator.requests[0].params.constraint is None
    assert any(trajectory.samples[0].loss_mask)
    values = {metric.name: metric.value for metric in trajectory.metrics}
    names = ("strict", "tool_choice", "parallel_tool_calls")
    assert [values[f"proxy/unenforced_{name}"] for name in names] == [1, 1, 1]
