"""Streams token by token through real tokenizers and templates, with OpenAI's own client.

Without `TREADLE_TEST_DATA` only a tokenizer of bytes that is made here.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treadle.agent_loop import (
    AgentTask,
    Completion,
    FinishReason,
    LoopLimits,
    Message,
    PlacedImage,
    RequestContext,
    SamplingParams,
    Services,
    TokenChunk,
)
from treadle.agent_loop.hf import HfRenderer
from treadle.agent_loop.proxy import AgentSession, ProxyAgentLoop

DATA = os.environ.get("TREADLE_TEST_DATA")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"text": "Übung 🧵 和"}}\n</tool_call>'
TEXTS = {
    "characters": "Grüße, 世界! 👩‍🔬 e\u0301 🏳️‍🌈 naïve — 10 €.",
    "marks in prose": "a <tool_ b <think c </think> 1 < 2 🙂 < t",
    "reasoning": "<think>\n先に考える… 🤔 ½\n</think>\n\nAntwort: ça va?",
    "reasoning and call": f"<think>\nüben\n</think>\n\nIch rechne 🧮:\n{CALL}",
    "two calls": f"{CALL}\n{CALL}",
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
USER: list[Any] = [{"role": "user", "content": "Grüß 🙂"}]


class EachToken:
    """Samples the same ids for each request, and tells them one by one."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        chunks = tuple(
            TokenChunk(token_ids=(token,), logprobs=(-0.5,), weight_version=0)
            for token in self._ids
        )
        for chunk in chunks if request.on_tokens is not None else ():
            assert request.on_tokens is not None
            request.on_tokens(chunk)
        return Completion(chunks=chunks, finish=FinishReason.STOP)

    def finish_session(self, session_id: str) -> None:
        pass


def _bytes() -> HfRenderer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>"
    )
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return HfRenderer(tokenizer, parser="qwen3")


def _renderer(name: str) -> HfRenderer:
    if name == "bytes":
        return _bytes()
    if DATA is None:
        pytest.skip("TREADLE_TEST_DATA names no folder with tokenizers")
    return HfRenderer.from_directory(Path(DATA) / "tokenizers" / name, parser="qwen3")


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["bytes", "qwen2.5", "qwen3", "tiny"])
async def test_deltas_add_up_to_the_answer_that_is_not_a_stream(name: str) -> None:
    renderer = _renderer(name)
    limits = LoopLimits(max_response_tokens=10_000)
    sampling = SamplingParams(max_tokens=1000, temperature=1.0)
    for kind, text in TEXTS.items():
        ids = (*renderer.encode(text), renderer.stop_token_ids[0])
        services = Services(
            generator=EachToken(ids), renderer=renderer, limits=limits, sampling=sampling
        )
        task = AgentTask(
            task_id=kind,
            sample_index=0,
            rollout_index=0,
            loop="x",
            messages=(Message(role="user", content="u"),),
        )
        trajectory = await ProxyAgentLoop(_compare).run(task, services)
        assert all(sample.ids[-len(ids) :] == ids for sample in trajectory.samples), kind


async def _compare(session: AgentSession) -> None:
    async with AsyncOpenAI(
        base_url=session.base_url,
        api_key=session.api_key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        await _chat(client)
        await _responses(client)


async def _chat(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="x", messages=USER, tools=TOOLS)
    message = whole.choices[0].message
    content, reasoning, num_deltas = "", "", 0
    calls: dict[int, tuple[str, str]] = {}
    stream = await client.chat.completions.create(
        model="x", messages=USER, tools=TOOLS, stream=True
    )
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thought = getattr(delta, "reasoning_content", None) or ""
        reasoning += thought
        num_deltas += bool(delta.content or thought)
        for part in delta.tool_calls or ():
            assert part.function is not None
            named, arguments = calls.get(part.index, ("", ""))
            calls[part.index] = (
                named + (part.function.name or ""),
                arguments + (part.function.arguments or ""),
            )
    assert content == (message.content or "")
    assert reasoning == (getattr(message, "reasoning_content", None) or "")
    assert [calls[index] for index in sorted(calls)] == [
        (call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
        if call.type == "function"
    ]
    assert content or reasoning or calls
    assert "\N{REPLACEMENT CHARACTER}" not in content + reasoning
    assert num_deltas > 5 or not content + reasoning, "it came in few pieces"


async def _responses(client: AsyncOpenAI) -> None:
    flat: list[Any] = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    whole = await client.responses.create(model="x", input=USER, tools=flat)
    content, reasoning, arguments = "", "", list[str]()
    stream = await client.responses.create(model="x", input=USER, tools=flat, stream=True)
    async for event in stream:
        match event.type:
            case "response.output_text.delta":
                content += event.delta
            case "response.reasoning_text.delta":
                reasoning += event.delta
            case "response.function_call_arguments.done":
                arguments.append(event.arguments)
    thoughts = [item for item in whole.output if item.type == "reasoning"]
    assert content == whole.output_text
    assert reasoning == "".join(part.text for item in thoughts for part in item.content or ())
    assert arguments == [item.arguments for item in whole.output if item.type == "function_call"]
