"""Fine-tuning with real templates: a turn before which history is rewritten has its own prompt."""

import os
from pathlib import Path

import pytest

from chat_templates.conversations import CONVERSATIONS, REASONING, TOOLS, Conversation, thinking
from chat_templates.table import make_tokenizer
from treadle.agent_loop import Origin
from treadle.agent_loop.hf import HfRenderer
from treadle.trainer.sft import Demonstration, transcribe

DATA = os.environ.get("TREADLE_TEST_DATA")
pytestmark = pytest.mark.skipif(
    DATA is None, reason="TREADLE_TEST_DATA names no folder with chat_templates"
)
BY_NAME = {conversation.name: conversation for conversation in CONVERSATIONS}


def _renderer(name: str) -> HfRenderer:
    data = Path(str(DATA))
    template = (data / "chat_templates" / f"{name}.jinja").read_text()
    return HfRenderer(make_tokenizer(data / "tokenizers/qwen3", name, template))


@pytest.mark.parametrize(
    ("name", "conversation", "num_ledgers"),
    [
        # Past turns lose their reasoning where a user speaks again, and keep it in rounds of tools.
        ("Qwen-Qwen3-0.6B", "chat", 3),
        ("Qwen-Qwen3-0.6B", "rounds", 2),
        ("Qwen3.5-4B", "chat", 3),
        ("Qwen3.5-4B", "rounds", 2),
        ("MiniMax-M2", "chat", 3),
        ("MiniMax-M2", "rounds", 2),
        # The token that ends an answer is written in training only, as is its reasoning.
        ("openai-gpt-oss-120b", "chat", 3),
        # These rewrite nothing, and write no reasoning.
        ("Qwen-Qwen2.5-7B-Instruct", "rounds", 1),
        ("meta-llama-Llama-3.1-8B-Instruct", "tool", 1),
    ],
)
def test_each_turn_is_trained_once_on_the_prompt_of_inference(
    name: str, conversation: str, num_ledgers: int
) -> None:
    renderer = _renderer(name)
    shown = BY_NAME[conversation] if num_ledgers == 1 else thinking(BY_NAME[conversation])
    tools = TOOLS if shown.tools else ()
    ledgers = transcribe(renderer, Demonstration(messages=shown.messages, tools=tools))
    assert len(ledgers) == num_ledgers
    said = [
        (renderer.decode(tokens.ids[: span.start]), tokens.ids[span.start : span.stop])
        for tokens in ledgers
        for span in tokens.spans
        if span.origin is Origin.SAMPLED
    ]
    turns = [i for i, message in enumerate(shown.messages) if message.role == "assistant"]
    assert len(said) == len(turns)
    for turn, (prompt, ids) in zip(turns, said, strict=True):
        # The prompt is what inference renders before this turn, and the turn ends with a stop.
        rendered = renderer.render(shown.messages[:turn], tools=tools).ids
        assert prompt == renderer.decode(rendered)
        assert ids[-1] in renderer.stop_token_ids
        text = renderer.decode(ids)
        assert shown.messages[turn].content in text
        if num_ledgers > 1:
            assert REASONING in text


def test_an_answer_is_learned_of_a_template_that_then_drops_the_reasoning_of_calls() -> None:
    renderer = _renderer("openai-gpt-oss-120b")
    shown = thinking(BY_NAME["tool"])
    (tokens,) = transcribe(renderer, Demonstration(messages=shown.messages, tools=TOOLS))
    texts = [
        (span.origin, renderer.decode(tokens.ids[span.start : span.stop])) for span in tokens.spans
    ]
    (_, call), (_, result), (_, answer) = texts[1:]
    assert [origin for origin, _ in texts[1:]] == [Origin.SAMPLED, Origin.OBSERVED, Origin.SAMPLED]
    thought = f"<|channel|>analysis<|message|>{REASONING}<|end|><|start|>assistant"
    assert call.startswith(f"{thought} to=functions.") and call.endswith("<|call|>")
    assert result.endswith("<|end|><|start|>assistant")
    content = shown.messages[-1].content
    assert answer == f"{thought}<|channel|>final<|message|>{content}<|return|>"


@pytest.mark.parametrize(
    ("name", "shown", "what"),
    [
        ("meta-llama-Llama-3.1-8B-Instruct", BY_NAME["rounds"], "content of message 2, 'I compute"),
        (
            "Qwen-Qwen2.5-7B-Instruct",
            thinking(BY_NAME["rounds"]),
            "reasoning of message 2, 'Let me",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused(name: str, shown: Conversation, what: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template leaves out the {what}"):
        transcribe(_renderer(name), Demonstration(messages=shown.messages, tools=TOOLS))
