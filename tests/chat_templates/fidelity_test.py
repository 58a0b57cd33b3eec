"""Tests of the comparison, with small templates; and of the page, where the data is at hand."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_templates import table
from chat_templates.conversations import CONVERSATIONS, TOOLS, reduced, thinking
from chat_templates.fidelity import Verdict, compare
from treadle.agent_loop import Message, RenderError, Rendering, SetupError
from treadle.agent_loop.hf import HfRenderer
from treadle.agent_loop.hf.template import ChatTemplate

DATA = os.environ.get("TREADLE_TEST_DATA")
PAGE = Path(__file__).parents[2] / "docs/chat_templates.md"
WHOLE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|model|>{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}<|end|>{{ '\\n' }}"
    "{% else %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)
ROUNDS = next(c for c in CONVERSATIONS if c.name == "rounds")
CHAT = CONVERSATIONS[0]


def pair(template: str) -> tuple[HfRenderer, Any]:
    """A renderer and its tokenizer, of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|end|>"
    )
    tokenizer.add_tokens(["<|user|>", "<|model|>"], special_tokens=True)
    tokenizer.chat_template = template
    renderer = HfRenderer(tokenizer, parser="hermes")
    renderer.template.shows_tools = True  # whether it does is not compared
    return renderer, tokenizer


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c.name)
def test_a_template_that_only_appends_is_exact(conversation: Any) -> None:
    assert compare(*pair(WHOLE), conversation).verdict is Verdict.EXACT


def test_a_template_that_drops_reasoning_rewrites_the_past() -> None:
    thought = "{% if loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content"
    found = compare(*pair(WHOLE.replace("{{ m.content", thought, 1)), thinking(CHAT))
    assert (found.verdict, found.cause) == (
        Verdict.PAST,
        "the reasoning of past turns, or its marks, are left out",
    )


def test_what_is_refused_is_named() -> None:
    strict = WHOLE.replace("{{ m.role }}", "{{ m.role if m.role != 'system' else m.a.b }}")
    found = compare(*pair(strict), CHAT)
    assert found.verdict is Verdict.REFUSED
    assert "UndefinedError" in found.cause


def test_a_turn_in_two_pieces_is_split() -> None:
    late = "{% if m.tool_calls %}<|model|>{{ m.content }}<|end|>{% endif %}{% else %}<|user|>"
    template = WHOLE.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}", 1)
    template = template.replace("{% else %}<|user|>", late, 1)
    found = compare(*pair(template), ROUNDS)
    assert (found.verdict, found.cause) == (
        Verdict.SPLIT,
        "it writes 'I compute.' apart from the rest of its turn",
    )


def test_a_boundary_that_is_a_token_short_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl issue #6501: the newline behind the end of the turn was missing."""
    renderer, tokenizer = pair(WHOLE)
    exact = renderer.extend

    def short(ids: Sequence[int], messages: Sequence[Message], **kwargs: Any) -> Rendering:
        return Rendering(ids=exact(ids, messages, **kwargs).ids[1:])

    monkeypatch.setattr(renderer, "extend", short)
    assert compare(renderer, tokenizer, CHAT).verdict is Verdict.WRONG


@pytest.mark.skipif(DATA is None, reason="TREADLE_TEST_DATA names no folder with chat_templates")
def test_the_page_is_what_the_templates_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["table.py", str(DATA), str(page)])
    assert table.main() == 0
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


@pytest.mark.skipif(DATA is None, reason="TREADLE_TEST_DATA names no folder with chat_templates")
def test_a_text_is_that_of_transformers(tmp_path: Path) -> None:
    assert DATA is not None
    pair(WHOLE)[1].save_pretrained(tmp_path)
    compared = 0
    for file in sorted((Path(DATA) / "chat_templates").glob("*.jinja")):
        tokenizer = table.make_tokenizer(tmp_path, file.stem, file.read_text(encoding="utf-8"))
        try:
            template = ChatTemplate(tokenizer, {})
        except SetupError:
            continue
        chats = [c for chat in CONVERSATIONS for c in reduced(chat)]
        for chat in [*chats, *map(thinking, chats)]:
            tools = TOOLS if chat.tools else ()
            try:
                text = template.text(chat.messages, tools, open_turn=True)
            except RenderError:
                continue
            assert text == tokenizer.apply_chat_template(
                template.dicts(chat.messages),
                tools=[tool.as_schema() for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=False,
            )
            compared += 1
    assert compared > 1000
