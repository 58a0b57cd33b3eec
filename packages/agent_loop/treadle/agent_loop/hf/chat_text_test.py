"""Tests that a chat is rendered as transformers renders it, the short way and the public one."""

import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from treadle.agent_loop.hf.chat_text import ChatText, is_plain

TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [True, None, 1.5]}}}
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "<b> & \u00e9"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [{"id": "x"}]},
    {"role": "assistant", "content": "done", "reasoning_content": "Hm."},
]
ALL = (
    "{{ bos_token | default('none') }}{{ eos_token }}{{ mood | default('none') }}"
    "{% for m in messages %}{{ m | tojson }}{{ '\\n' }}{% endfor %}"
    "{{ tools | tojson }}{{ documents }}{% if add_generation_prompt %}>{% endif %}"
)


def make_tokenizer(template: object = ALL, kind: type = PreTrainedTokenizerFast) -> Any:
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer = kind(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def both(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, object]] | None,
    kwargs: Mapping[str, object],
) -> str:
    """Renders both ways, with and without the next header; returns the text with it."""
    made = ChatText(tokenizer, kwargs)
    texts = []
    for open_turn in (False, True):
        text = made.render(messages, tools, open_turn=open_turn, plain_tools=is_plain(tools))
        assert text == tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=open_turn, tokenize=False, **kwargs
        )
        texts.append(text)
    return texts[1]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("kwargs", [{}, {"mood": {"calm": 1}}, {"eos_token": "<other>"}])
def test_plain_data_give_the_text_of_transformers(
    tools: list[dict[str, object]] | None, kwargs: dict[str, object]
) -> None:
    tokenizer = make_tokenizer()
    assert ChatText(
        tokenizer, kwargs
    ).direct  # else this version of transformers differs: see there
    both(tokenizer, MESSAGES, tools, kwargs)


class Color(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    "odd",
    [Color.RED, MappingProxyType({"a": 1}), (1, 2), object, {1: "a"}, [{"a": {"b": Color.RED}}]],
)
def test_other_data_take_the_public_way(odd: object) -> None:
    tokenizer = make_tokenizer()
    assert not is_plain(odd)
    both(tokenizer, [{"role": "user", "content": odd}], TOOLS, {})
    both(tokenizer, MESSAGES, [{"function": {"default": odd}}], {})
    assert not ChatText(tokenizer, {"mood": odd}).direct
    both(tokenizer, MESSAGES, None, {"mood": odd})


def test_a_tokenizer_with_a_template_for_tools_uses_it_for_these() -> None:
    tokenizer = make_tokenizer({"default": "plain" + ALL, "tool_use": "tools" + ALL})
    assert both(tokenizer, MESSAGES, None, {}).startswith("plain")
    assert both(tokenizer, MESSAGES, TOOLS, {}).startswith("tools")
    only = ChatText(make_tokenizer({"tool_use": ALL}), {})
    with pytest.raises(ValueError, match="no default"):
        only.render(MESSAGES, None, open_turn=True, plain_tools=True)
    assert only.render(MESSAGES, TOOLS, open_turn=True, plain_tools=True)


def test_arguments_of_transformers_are_not_taken_for_the_templates() -> None:
    kwargs = {"documents": [{"title": "a", "text": "b"}]}
    assert "title" in both(make_tokenizer(), MESSAGES, None, kwargs)


def test_a_tokenizer_with_a_method_of_its_own_keeps_it() -> None:
    class Loud(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            text: Any = super().apply_chat_template(*args, **kwargs)
            return text.upper()

    assert "DONE" in both(make_tokenizer(kind=Loud), MESSAGES, None, {})


def test_no_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        ChatText(make_tokenizer(), {}).render([], None, open_turn=True, plain_tools=True)


MESSAGE = {"items": 1, "role": "user", "a": {"b": None}, "__class__": 2, "update": 3}
NAMES = [*MESSAGE, "a.b", "missing", "missing.more", "a.c", "__len__", "keys()", "copy()"]
LOOP = ["first", "last", "index", "index0", "length", "revindex", "revindex0", "previtem"]
LOOP += ["nextitem", "depth", "cycle(1)", "changed(m)", "_iterator", "missing", "__class__"]


@pytest.mark.parametrize(
    "expression", [*(f"m.{name}" for name in NAMES), *(f"loop.{name}" for name in LOOP)]
)
def test_attributes_are_those_of_the_sandbox(expression: str) -> None:
    tokenizer = make_tokenizer(
        f"{{% for m in messages %}}{{{{ {expression} is defined }}}}{{{{ {expression} }}}}\n"
        "{% endfor %}"
    )
    made, messages, texts = ChatText(tokenizer, {}), [MESSAGE, MESSAGE], list[object]()
    for render in (
        lambda: made.render(messages, None, open_turn=True, plain_tools=True),
        lambda: tokenizer.apply_chat_template(messages, tokenize=False),
    ):
        try:
            texts.append(re.sub(" at 0x[0-9a-f]+", "", render()))
        except Exception as error:
            texts.append((type(error), str(error)))
    assert texts[0] == texts[1]
