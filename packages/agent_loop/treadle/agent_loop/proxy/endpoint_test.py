"""The endpoint over real sockets, with OpenAI's own client."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from treadle.agent_loop import (
    AgentTask,
    EngineFailedError,
    LoopError,
    LoopLimits,
    Message,
    OverloadedError,
    SamplingParams,
    Services,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.proxy import AgentSession, ProxyAgentLoop
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator

pytestmark = pytest.mark.asyncio

TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="proxy",
    messages=(Message(role="user", content="What is 2 + 3?"),),
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
CALL = 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 2.0, "b": 3}}\n</tool_call>'
USER: Any = {"role": "user", "content": "u"}
Script = Callable[[AsyncOpenAI, ScriptedGenerator], Awaitable[float | None]]


def services(generator: ScriptedGenerator, **limits: Any) -> Services:
    return Services(
        generator=generator,
        renderer=ByteRenderer(),
        limits=replace(LoopLimits(max_response_tokens=2000), **limits),
        sampling=SamplingParams(max_tokens=500, temperature=1.0),
    )


def client_of(session: AgentSession) -> AsyncOpenAI:
    """OpenAI's client; not having to read the certificates of the world, it starts at once."""
    return AsyncOpenAI(
        base_url=session.base_url,
        api_key=session.api_key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )


def web_of(session: AgentSession) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {session.api_key}"}
    return httpx.AsyncClient(headers=headers, verify=False)


async def run(script: Script, *replies: Any, limits: Any = None, **options: Any) -> Trajectory:
    """Runs an agent that is a script over OpenAI's client."""
    generator = ScriptedGenerator(replies)

    async def agent(session: AgentSession) -> float | None:
        async with client_of(session) as client:
            return await script(client, generator)

    loop = ProxyAgentLoop(agent, **options)
    return await loop.run(TASK, services(generator, **(limits or {})))


def trained(trajectory: Trajectory) -> list[str]:
    """What is under the loss mask of each sample."""
    return [
        ByteRenderer().decode([t for t, on in zip(s.ids, s.loss_mask, strict=True) if on])
        for s in trajectory.samples
    ]


async def refused(call: Awaitable[object]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return caught.value


async def test_1_a_conversation_with_tools_is_one_sample_of_the_sampled_ids() -> None:
    async def script(client: AsyncOpenAI, _: ScriptedGenerator) -> None:
        messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
        first = await client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=TOOLS, tool_choice="auto"
        )
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Hm."
        assert choice.message.tool_calls is not None
        call = choice.message.tool_calls[0]
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 2.0, "b": 3}')
        messages.append(choice.message.model_dump())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        second = await client.chat.completions.create(model="x", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It is 5."
        assert second.choices[0].finish_reason == "stop"
        assert second.model == "policy"
        assert second.usage is not None
        assert second.usage.completion_tokens == len("It is 5.") + 1

    trajectory = await run(script, CALL, "It is 5.")
    assert trained(trajectory) == [f"{CALL}<end>It is 5.<end>"]
    assert trajectory.stop is StopReason.FINISHED
    assert trajectory.final_text == "It is 5."
    assert trajectory.reward is None
    assert {m.name: m.value for m in trajectory.metrics}["capture/exact"] == 1


async def test_2_a_stream_says_what_a_plain_answer_says() -> None:
    async def script(client: AsyncOpenAI, _: ScriptedGenerator) -> None:
        messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
        stream = await client.chat.completions.create(
            model="x",
            messages=messages,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == "Hm."
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert [call.index for call in calls] == [0]
        assert calls[0].function is not None
        assert calls[0].function.arguments == '{"a": 2.0, "b": 3}'
        assert choices[-1].finish_reason == "tool_calls"
        async with client.chat.completions.stream(
            model="x", messages=[*messages, *messages]
        ) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.content == "Two questions."

    trajectory = await run(script, CALL, "Two questions.")
    assert trained(trajectory) == [f"{CALL}<end>", "Two questions.<end>"]


async def test_3_logprobs_are_those_of_every_sampled_token() -> None:
    async def script(client: AsyncOpenAI, _: ScriptedGenerator) -> None:
        answer = await client.chat.completions.create(model="x", messages=[USER], logprobs=True)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        tokens = [(t.token, t.logprob) for t in logprobs.content]
        assert tokens == [("o", -0.5), ("k", -0.5), ("<end>", -0.5)]

    trajectory = await run(script, "ok")
    assert sum(trajectory.tokens.logprobs) == -1.5


async def test_4_the_request_s_bounds_seed_and_stop_strings_are_kept() -> None:
    async def script(client: AsyncOpenAI, generator: ScriptedGenerator) -> None:
        cut = await client.chat.completions.create(model="x", messages=[USER], max_tokens=2)
        assert cut.choices[0].finish_reason == "length"
        await client.chat.completions.create(
            model="x", messages=[USER, USER], max_completion_tokens=7, seed=5, temperature=1.0
        )
        stopped = await client.chat.completions.create(
            model="x", messages=[USER, USER, USER], stop=["</code>"]
        )
        assert stopped.choices[0].message.content == "go"
        params = [request.params for request in generator.requests]
        assert [p.max_tokens for p in params] == [2, 7, 500]
        assert params[1].seed == 5

    trajectory = await run(script, "long", "more", "go</code> and on")
    assert trained(trajectory) == ["lo", "more<end>", "go</code>"]


async def test_5_what_is_not_supported_is_refused_by_name() -> None:
    async def script(client: AsyncOpenAI, generator: ScriptedGenerator) -> None:
        for name, value in {
            "top_logprobs": 2,
            "temperature": 0.2,
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
            "logit_bias": {"1": 5},
            "frequency_penalty": 0.5,
            "top_k": 3,
        }.items():
            error = await refused(
                client.chat.completions.create(
                    model="x",
                    messages=[USER],
                    extra_body={name: value},
                )
            )
            assert isinstance(error, openai.BadRequestError)
            assert error.param == name
            assert error.code == "unsupported_parameter"
            assert name in error.message
        assert generator.requests == []
        await client.chat.completions.create(
            model="x",
            messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": "u"}],
            n=1,
            frequency_penalty=0,
            temperature=1,
            tool_choice="none",
            user="me",
        )

    assert trained(await run(script, "ok")) == ["ok<end>"]


async def test_6_an_agent_s_temperature_is_refused_replaced_or_used() -> None:
    async def script(client: AsyncOpenAI, generator: ScriptedGenerator) -> None:
        await client.chat.completions.create(model="x", messages=[USER], temperature=0.2, top_p=0.5)
        used.append(generator.requests[0].params)

    used: list[SamplingParams] = []
    await run(script, "ok", sampling="run")
    await run(script, "ok", sampling="agent")
    assert [(p.temperature, p.top_p) for p in used] == [(1.0, None), (0.2, 0.5)]


async def test_7_only_the_session_s_own_key_opens_it() -> None:
    async def script(client: AsyncOpenAI, _: ScriptedGenerator) -> None:
        messages = [USER]
        wrong = client.with_options(api_key="sk-wrong")
        error = await refused(wrong.chat.completions.create(model="x", messages=messages))
        assert isinstance(error, openai.AuthenticationError)
        unknown = client.with_options(base_url=f"{client.base_url.join('/')}sessions/0/v1")
        error = await refused(unknown.chat.completions.create(model="x", messages=messages))
        assert error.code == "session_not_found"
        models = await client.models.list()
        assert [model.id for model in models.data] == ["policy"]
        await client.chat.completions.create(model="x", messages=messages)

    await run(script, "ok")


async def test_8_a_session_that_is_over_is_gone() -> None:
    addresses: list[tuple[str, str]] = []
    ended = asyncio.Event()

    async def first(session: AgentSession) -> None:
        addresses.append((session.base_url, session.api_key))
        await ask(session)

    async def second(session: AgentSession) -> None:
        await ended.wait()
        old, key = addresses[0]
        stale = replace(session, base_url=old, api_key=key)
        with pytest.raises(openai.NotFoundError, match="is over"):
            await ask(stale)
        await ask(session)

    async def ask(session: AgentSession) -> None:
        async with client_of(session) as client:
            await client.chat.completions.create(model="x", messages=[USER])

    async def agent(session: AgentSession) -> None:
        await (first if session.task.task_id == "first" else second)(session)

    async def attempt(name: str) -> Trajectory:
        trajectory = await loop.run(replace(TASK, task_id=name), kit)
        ended.set()
        return trajectory

    loop, kit = ProxyAgentLoop(agent), services(ScriptedGenerator(["one", "two"]))
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(attempt(name)) for name in ("first", "second")]
    assert [trained(run.result()) for run in runs] == [["one<end>"], ["two<end>"]]
    assert addresses[0][0].startswith("http://127.0.0.1:")


async def test_9_too_many_requests_at_a_time_are_told_when_to_come_back() -> None:
    async def script(client: AsyncOpenAI, generator: ScriptedGenerator) -> None:
        answers = []
        generator.hold()
        async with asyncio.TaskGroup() as group:
            for text in ("u", "v"):
                answers.append(
                    group.create_task(
                        client.chat.completions.create(
                            model="x", messages=[{"role": "user", "content": text}]
                        )
                    )
                )
            await generator.until_running(2)
            error = await refused(
                client.chat.completions.create(
                    model="x", messages=[{"role": "user", "content": "w"}]
                )
            )
            generator.release()
        assert isinstance(error, openai.RateLimitError)
        assert error.response.headers["retry-after"] == "1"
        assert len({answer.result().id for answer in answers}) == 2

    trajectory = await run(script, "one", "two", max_session_requests=2)
    assert sorted(trained(trajectory)) == ["one<end>", "two<end>"]
    trajectory = await run(script, "one", "two", max_requests=2)
    assert len(trajectory.samples) == 2


async def test_9b_a_request_whose_body_does_not_come_has_a_place_of_its_session_only() -> None:
    stalled, answered = asyncio.Event(), asyncio.Event()

    async def agent(session: AgentSession) -> None:
        async with web_of(session) as web:
            url = f"{session.base_url}/chat/completions"
            if session.task.task_id == "stalls":
                await stall(session)
                answer = await web.post(url, json={"messages": [USER]})
                assert "this session has 1 requests in flight" in answer.text
                stalled.set()
                await answered.wait()
            else:
                await stalled.wait()
                answer = await web.post(url, json={"messages": [USER]})
                assert answer.status_code == 200  # It stops nobody else.
                answered.set()

    async def stall(session: AgentSession) -> None:
        url = httpx.URL(session.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        connections.append(writer)
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n"
        key = f"Authorization: Bearer {session.api_key}\r\nExpect: 100-continue\r\n\r\n"
        writer.write((head + key).encode())
        assert b"100" in await reader.readline()  # its body is waited for

    async def attempt(name: str) -> Trajectory:
        return await loop.run(replace(TASK, task_id=name), kit)

    connections: list[asyncio.StreamWriter] = []
    loop = ProxyAgentLoop(agent, max_session_requests=1, max_requests=1)
    kit = services(ScriptedGenerator(["one"]))
    async with asyncio.TaskGroup() as group:
        other = group.create_task(attempt("other"))
        with pytest.raises(LoopError, match="got no completion"):
            await attempt("stalls")
    assert trained(other.result()) == ["one<end>"]
    for connection in connections:
        connection.close()


async def test_10_a_client_that_hangs_up_cancels_its_completion() -> None:
    async def script(client: AsyncOpenAI, generator: ScriptedGenerator) -> None:
        for stream in (False, True):
            generator.hold()
            call = asyncio.create_task(
                client.chat.completions.create(model="x", messages=[USER], stream=stream)
            )
            await generator.until_running(1)
            call.cancel()
            await asyncio.wait([call])
            await generator.until_idle()
            generator.release()
        assert generator.num_aborted == 2
        await client.chat.completions.create(model="x", messages=[USER])

    trajectory = await run(script, "ok")
    assert trained(trajectory) == ["ok<end>"]
    assert {m.name: m.value for m in trajectory.metrics}["capture/failed"] == 2


async def test_11_an_edited_history_forks() -> None:
    async def script(client: AsyncOpenAI, _: ScriptedGenerator) -> None:
        messages: list[Any] = [USER]
        for edit in ("", "!", ""):
            answer = await client.chat.completions.create(model="x", messages=messages)
            content = f"{answer.choices[0].message.content}{edit}"
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": "next"},
            ]

    trajectory = await run(script, "one", "two", "three")
    assert trained(trajectory) == ["one<end>two<end>", "three<end>"]
    assert [f.kind for f in trajectory.findings if f.kind != "drift"] == ["fork"]


async def test_12_failures_of_the_servers_are_told_as_such() -> None:
    async def script(client: AsyncOpenAI, _: ScriptedGenerator) -> None:
        messages: list[Any] = [USER]
        error = await refused(client.chat.completions.create(model="x", messages=messages))
        assert isinstance(error, openai.RateLimitError)
        error = await refused(client.chat.completions.create(model="x", messages=messages))
        assert (error.status_code, error.code) == (502, "engine_failed")
        await client.with_options(max_retries=1).chat.completions.create(
            model="x", messages=messages
        )

    trajectory = await run(
        script, OverloadedError("full"), EngineFailedError("gone"), OverloadedError("full"), "ok"
    )
    assert trained(trajectory) == ["ok<end>"]


async def test_13_limits_are_told_in_openai_s_words() -> None:
    async def script(client: AsyncOpenAI, _: ScriptedGenerator) -> None:
        messages: list[Any] = [USER]
        await client.chat.completions.create(model="x", messages=messages)
        messages += [
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "x" * 50},
        ]
        error = await refused(client.chat.completions.create(model="x", messages=messages))
        assert (error.status_code, error.code) == (400, "context_length_exceeded")

    trajectory = await run(script, "one", limits={"max_response_tokens": 40})
    assert trajectory.stop is StopReason.RESPONSE_LENGTH


async def test_14_requests_that_are_too_long_or_no_json_are_refused() -> None:
    async def agent(session: AgentSession) -> None:
        async with web_of(session) as web:
            url = f"{session.base_url}/chat/completions"
            answer = await web.post(url, content=b"{")
            assert answer.status_code == 400
            assert "not JSON" in answer.json()["error"]["message"]
            answer = await web.get(url)
            assert (answer.status_code, answer.json()["error"]["code"]) == (405, "not_found")
            answer = await web.post(url, content=b" " * ((64 << 20) + 1))
            assert answer.status_code == 413
            answer = await web.post(url, json={"messages": [USER]})
            assert answer.status_code == 200

    kit = services(ScriptedGenerator(["one"]))
    assert trained(await ProxyAgentLoop(agent).run(TASK, kit)) == ["one<end>"]


class SlowRenderer(ByteRenderer):
    """Renders a long text only after the event loop has answered another request."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.waited: list[bool] = []

    def render(self, messages: Any, **more: Any) -> Any:
        self.begun.set()
        self.waited.append(self.go_on.wait(timeout=60))
        return super().render(messages, **more)


async def test_a_long_message_of_one_agent_does_not_stop_the_others() -> None:
    renderer = SlowRenderer()

    async def agent(session: AgentSession) -> None:
        async with client_of(session) as client:
            messages: Any = [{"role": "user", "content": "1 " * (1 << 16)}]
            long = asyncio.create_task(client.chat.completions.create(model="m", messages=messages))
            await asyncio.to_thread(renderer.begun.wait, 60)
            assert [model.id async for model in client.models.list()] == ["policy"]
            renderer.go_on.set()
            assert (await refused(long)).code == "context_length_exceeded"
            messages = [USER]
            await client.chat.completions.create(model="m", messages=messages)

    limits = {"max_context_tokens": 1000}
    given = replace(services(ScriptedGenerator(["a"]), **limits), renderer=renderer)
    await ProxyAgentLoop(agent).run(TASK, given)
    assert all(renderer.waited)


class BoundRenderer(ByteRenderer):
    """Remembers the bound that it got; `hf/chat_renderer_test.py` tests what a bound does."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds: list[int] = []

    def bounded(self, max_tokens: int) -> "BoundRenderer":
        self.bounds.append(max_tokens)
        return self


async def test_the_context_bounds_what_is_tokenized() -> None:
    renderer = BoundRenderer()

    async def agent(session: AgentSession) -> None:
        async with client_of(session) as client:
            await client.chat.completions.create(model="m", messages=[USER])

    given = services(ScriptedGenerator(["a"]), max_context_tokens=1000)
    await ProxyAgentLoop(agent).run(TASK, replace(given, renderer=renderer))
    assert renderer.bounds == [1000]
