"""The Responses and the Messages API over real sockets; `tests/installs` has Anthropic's client."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, cast

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    RenderError,
    Rendering,
    SamplingParams,
    Services,
    ToolSpec,
    Trajectory,
)
from treadle.agent_loop.parsers import parser_named
from treadle.agent_loop.proxy import AgentConstraints, AgentSession, ProxyAgentLoop
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator

pytestmark = pytest.mark.asyncio

CALL = 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 2.0, "b": "ä"}}\n</tool_call>'
THOUGHT = f"<think>\nWell.\n</think>\n\n{CALL}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
Agent = Callable[[AgentSession], Awaitable[None]]


async def run(
    agent: Agent, *replies: str, renderer: ByteRenderer | None = None, **options: Any
) -> Trajectory:
    services = Services(
        generator=ScriptedGenerator(replies),
        renderer=renderer or ByteRenderer(parser_named("qwen3")),
        limits=LoopLimits(max_response_tokens=2000, max_context_tokens=3000),
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


def trained(trajectory: Trajectory) -> list[str]:
    return [
        ByteRenderer().decode([t for t, on in zip(s.ids, s.loss_mask, strict=True) if on])
        for s in trajectory.samples
    ]


def values(trajectory: Trajectory) -> dict[str, float]:
    return {metric.name: metric.value for metric in trajectory.metrics if metric.value}


class TestResponses:
    TOOLS: ClassVar[list[Any]] = [
        {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
    ]

    async def client(
        self, script: Callable[[AsyncOpenAI], Awaitable[None]], *replies: str, **options: Any
    ) -> Trajectory:
        async def agent(session: AgentSession) -> None:
            async with AsyncOpenAI(
                base_url=session.base_url,
                api_key=session.api_key,
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(verify=False, trust_env=False),
            ) as client:
                await script(client)

        return await run(agent, *replies, **options)

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("by_id", [False, True])
    async def test_1_a_tool_loop_is_one_sample(self, streamed: bool, by_id: bool) -> None:
        async def script(client: AsyncOpenAI) -> None:
            async def ask(items: Any, previous: str | None) -> Any:
                given: dict[str, Any] = {"model": "x", "instructions": "s", "tools": self.TOOLS}
                given |= {"input": items, "previous_response_id": previous or openai.omit}
                if not streamed:
                    return await client.responses.create(**given)
                seen = [one async for one in await client.responses.create(**given, stream=True)]
                final = seen[-1].response
                done = [one.item for one in seen if one.type == "response.output_item.done"]
                assert [one.type for one in done] == [one.type for one in final.output]
                assert [one.id for one in done] == [one.id for one in final.output]
                texts = [one.delta for one in seen if one.type == "response.output_text.delta"]
                assert "".join(texts) == final.output_text
                assert [one.sequence_number for one in seen] == list(range(len(seen)))
                return final

            items: list[Any] = [{"role": "user", "content": "2 + 3?"}]
            first = await ask(items, None)
            thought, text, call = first.output
            assert thought.content[0].text == "Well."
            assert (text.content[0].text, first.output_text) == ("Hm.", "Hm.")
            assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2.0, "b": "ä"})
            answer = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
            more = [answer] if by_id else [*items, *(i.to_dict() for i in first.output), answer]
            second = await ask(more, first.id if by_id else None)
            assert (second.output_text, second.status) == ("It is 5.", "completed")
            assert second.usage.output_tokens == len("It is 5.") + 1

        trajectory = await self.client(script, THOUGHT, "It is 5.")
        assert trained(trajectory) == [f"{THOUGHT}<end>It is 5.<end>"]
        assert values(trajectory)["capture/exact"] == 1

    async def test_2_what_it_asks_for_by_default_is_counted_and_the_rest_refused(self) -> None:
        async def script(client: AsyncOpenAI) -> None:
            async def refused(**given: Any) -> Any:
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.responses.create(**{"model": "x", "input": "u", **given})
                return caught.value

            wrong: list[tuple[dict[str, Any], str]] = [
                ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
                ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0]"),
                ({"background": True}, "background"),
                ({"max_tool_calls": 3}, "max_tool_calls"),
                ({"previous_response_id": "resp_0"}, "previous_response_id"),
                ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
                ({"input": []}, "input"),
            ]
            for given, param in wrong:
                assert (await refused(**given)).param == param
            assert '"custom" is not supported' in (await refused(**wrong[0][0])).message
            cut = await client.responses.create(
                model="x",
                input="u",
                max_output_tokens=2,
                extra_body={"client_metadata": {"session_id": "1"}},  # Codex
                reasoning={"effort": "low"},
                include=["reasoning.encrypted_content", "message.output_text.logprobs"],
                text={"format": {"type": "json_object"}, "verbosity": "low"},
                store=False,
            )
            assert cut.status == "incomplete" and cut.output_text == "lo"
            part: Any = cut.output[0]
            assert [one.token for one in part.content[0].logprobs] == ["l", "o"]
            assert (await refused(previous_response_id=cut.id)).status_code == 404

        trajectory = await self.client(script, "long", constraints=AgentConstraints.IGNORE)
        assert values(trajectory)["proxy/ignored_keys"] == 3
        assert values(trajectory)["proxy/unenforced_response_format"] == 1

    async def test_3_tools_in_a_namespace_are_served_and_hosted_ones_are_left_out(self) -> None:
        # As Codex sends them by default.
        space = {"type": "namespace", "name": "n", "description": "Numbers.", "tools": self.TOOLS}
        hosted = {"type": "web_search", "external_web_access": True}

        async def script(client: AsyncOpenAI) -> None:
            given: dict[str, Any] = {"model": "x", "input": "u", "tools": [hosted, space]}
            async with client.responses.stream(**given) as stream:
                call: Any = (await stream.get_final_response()).output[-1]
            assert (call.name, call.namespace) == ("add", "n")
            answer = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
            given["input"] = [{"role": "user", "content": "u"}, call.to_dict(), answer]
            assert (await client.responses.create(**given)).output_text == "5"
            twice = {**given, "tools": [space, *self.TOOLS]}
            with pytest.raises(openai.BadRequestError, match="more than one tool with the name"):
                await client.responses.create(**twice)

        only_call = CALL.removeprefix("Hm.\n")
        trajectory = await self.client(script, only_call, "5", constraints=AgentConstraints.IGNORE)
        assert trained(trajectory) == [f"{only_call}<end>5<end>"]
        assert values(trajectory)["proxy/unenforced_hosted_tools"] == 2
        assert values(trajectory)["proxy/ignored_keys"] == 2  # the namespace's description

        async def asks(client: AsyncOpenAI) -> None:
            with pytest.raises(
                openai.BadRequestError, match=r"web_search.*AgentConstraints.IGNORE"
            ):
                await client.responses.create(model="x", input="u", tools=[cast(Any, hosted)])
            await client.responses.create(model="x", input="u")

        await self.client(asks, "Hm.")


class TestMessages:
    TOOLS: ClassVar[list[Any]] = [
        {"name": "add", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    ]

    async def web(
        self, script: Callable[[httpx.AsyncClient], Awaitable[None]], *replies: str, **options: Any
    ) -> Trajectory:
        async def agent(session: AgentSession) -> None:
            headers = {"x-api-key": session.api_key, "anthropic-beta": "tools-2024"}
            url = f"{session.anthropic_base_url}/v1/"
            async with httpx.AsyncClient(base_url=url, headers=headers, verify=False) as web:
                await script(web)

        return await run(agent, *replies, **options)

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_1_a_tool_loop_is_one_sample(self, streamed: bool) -> None:
        async def script(web: httpx.AsyncClient) -> None:
            async def ask(messages: list[Any]) -> dict[str, Any]:
                body = {
                    "model": "claude",
                    "max_tokens": 300,
                    "system": [{"type": "text", "text": "s", "cache_control": {"type": "x"}}],
                    "messages": messages,
                    "tools": self.TOOLS,
                    "metadata": {"user_id": "me"},
                    "thinking": {"type": "enabled", "budget_tokens": 1024},
                    "stream": streamed,
                }
                answer = await web.post("messages", json=body)
                assert answer.status_code == 200, answer.text
                return added_up(answer.text) if streamed else answer.json()

            messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
            first = await ask(messages)
            thought, text, call = first["content"]
            assert (thought["thinking"], text["text"]) == ("Well.", "Hm.")
            assert (call["name"], call["input"]) == ("add", {"a": 2.0, "b": "ä"})
            assert first["stop_reason"] == "tool_use"
            result = {
                "type": "tool_result",
                "tool_use_id": call["id"],
                "content": [{"type": "text", "text": "5"}],
                "is_error": False,
            }
            more = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
            said = {"role": "assistant", "content": first["content"]}
            second = await ask([*messages, said, more])
            assert second["content"] == [{"type": "text", "text": "It is 5."}]
            assert (second["stop_reason"], second["usage"]["output_tokens"]) == ("end_turn", 9)

        trajectory = await self.web(script, THOUGHT, "It is 5.")
        assert trained(trajectory) == [f"{THOUGHT}<end>It is 5.<end>"]
        decoded = ByteRenderer().decode(trajectory.tokens.ids)
        assert "<tool>5<end><user>So?<end><assistant>" in decoded
        assert "<system>s<end><user>2 + 3?<end>" in decoded
        assert values(trajectory)["capture/exact"] == 1
        assert values(trajectory)["proxy/ignored_keys"] == 6  # system, tool and thinking, twice

    async def test_2_errors_are_anthropic_s_and_nothing_is_dropped(self) -> None:
        async def script(web: httpx.AsyncClient) -> None:
            user = [{"role": "user", "content": "u"}]
            ask = {"model": "x", "max_tokens": 9, "messages": user}
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
            document = [{"role": "user", "content": [{"type": "document"}]}]
            wrong: list[tuple[dict[str, Any], str]] = [
                ({"top_k": 3}, "top_k"),
                ({"tool_choice": {"type": "any"}, "tools": self.TOOLS}, "tool_choice"),
                ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
                ({"messages": document}, "messages[0].content[0].type"),
                ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0]"),
                ({"messages": [*user, {"role": "assistant", "content": "A"}]}, "last"),
                ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
            ]
            for given, named in wrong:
                answer = await web.post("messages", json={**ask, **given})
                error = answer.json()
                assert (answer.status_code, error["type"]) == (400, "error")
                assert error["error"]["type"] == "invalid_request_error"
                assert named in error["error"]["message"]
            denied = await web.post("messages", json=ask, headers={"x-api-key": "other"})
            assert denied.json()["error"]["type"] == "authentication_error"
            long = {**ask, "messages": [{"role": "user", "content": "u" * 4000}]}
            error = (await web.post("messages", json=long)).json()["error"]
            assert error["message"].startswith("prompt is too long: ")
            counted = await web.post("messages/count_tokens", json=ask)
            assert counted.json() == {"input_tokens": 4}
            stopped = await web.post("messages", json={**ask, "stop_sequences": ["!"]})
            told = stopped.json()
            assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "!")
            assert told["content"] == [{"type": "text", "text": "ok"}]

        trajectory = await self.web(script, "ok! more")
        assert trained(trajectory) == ["ok!"]


async def test_a_client_that_renders_itself_sends_and_gets_ids() -> None:
    renderer = ByteRenderer()
    prompt = [*renderer.encode("ask"), 259]

    async def agent(session: AgentSession) -> None:
        headers = {"authorization": f"Bearer {session.api_key}"}
        url = session.base_url.removesuffix("v1")
        async with httpx.AsyncClient(base_url=url, headers=headers, verify=False) as web:

            async def ask(token_ids: list[int], **params: Any) -> Any:
                body = {"model": "x", "token_ids": token_ids, "sampling_params": params}
                return (await web.post("inference/v1/generate", json=body)).json()

            told = (await ask([], logprobs=1))["error"]
            assert (told["param"], told["code"]) == ("token_ids", "invalid_value")
            assert (await ask(prompt, top_k=5))["error"]["param"] == "sampling_params.top_k"
            assert (await ask([9999]))["error"]["code"] == "invalid_value"
            first = await ask(prompt, logprobs=1, skip_special_tokens=False, stop_token_ids=[256])
            (choice,) = first["choices"]
            assert choice["token_ids"] == [*renderer.encode("one"), 256]
            assert choice["finish_reason"] == "stop"
            entries = choice["logprobs"]["content"]
            assert [e["token"] for e in entries] == [f"token_id:{i}" for i in choice["token_ids"]]
            longer = [*prompt, *choice["token_ids"], 258, 65, 259]
            await ask(longer, max_tokens=2)
            await ask([*longer, 66])  # Not what was sampled.
            both = await ask([67], n=2)
            assert [len(one["token_ids"]) for one in both["choices"]] == [5, 5]

    trajectory = await run(agent, "one", "two", "three", "four", "five")
    decoded = [renderer.decode(sample.ids) for sample in trajectory.samples]
    assert decoded == [
        "ask<assistant>one<end><user>A<assistant>tw",
        "ask<assistant>one<end><user>A<assistant>Bthree<end>",
        "Cfour<end>",
        "Cfive<end>",
    ]
    assert trained(trajectory) == ["one<end>tw", "three<end>", "four<end>", "five<end>"]
    counts = {k: v for k, v in values(trajectory).items() if k.startswith("capture/")}
    assert counts == {
        **{"capture/root": 2, "capture/exact": 1, "capture/fork": 1, "capture/choice": 1},
        "capture/samples": 4,
    }


class OfText(ByteRenderer):
    """Refuses images, as the renderer of a text model does."""

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
        if any(message.images for message in messages):
            raise RenderError("a message has images, and this renderer is of a text model")
        return super().render(messages, tools=tools)


@pytest.mark.parametrize("renderer", [OfText(), ByteRenderer()])
async def test_an_image_is_a_clear_error_400_for_a_text_model(renderer: ByteRenderer) -> None:
    data = "iVBORw0KGgo="
    url = f"data:image/png;base64,{data}"
    source = {"type": "base64", "media_type": "image/png", "data": data}
    asked: dict[str, dict[str, Any]] = {
        "chat/completions": {"type": "image_url", "image_url": {"url": url}},
        "responses": {"type": "input_image", "image_url": url},
        "messages": {"type": "image", "source": source},
    }

    async def agent(session: AgentSession) -> None:
        headers = {"authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(headers=headers, verify=False) as web:
            for api, part in asked.items():
                message = {"role": "user", "content": [part]}
                body = {"messages": [message], "max_tokens": 5, "model": "x"}
                if api == "responses":
                    body = {"input": [message], "model": "x"}
                answer = await web.post(f"{session.base_url}/{api}", json=body)
                if isinstance(renderer, OfText):
                    assert answer.status_code == 400
                    assert "of a text model" in answer.json()["error"]["message"]
                else:
                    assert answer.status_code == 200
            text = {"messages": [{"role": "user", "content": "u"}]}
            await web.post(f"{session.base_url}/chat/completions", json=text)

    trajectory = await run(agent, "a", "b", "c", "d", renderer=renderer)
    images = sum(len(sample.images) for sample in trajectory.samples)
    assert images == (0 if isinstance(renderer, OfText) else 3)


def added_up(stream: str) -> dict[str, Any]:
    """The message that a stream of events adds up to, as Anthropic's clients do it."""
    message: dict[str, Any] = {}
    for lines in stream.strip().split("\n\n"):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    block["json"] += delta["partial_json"]
                else:
                    kind = delta["type"].removesuffix("_delta")
                    block[kind] += delta[kind]
            case "content_block_stop":
                if text := message["content"][event["index"]].pop("json"):
                    message["content"][event["index"]]["input"] = json.loads(text)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message
