"""What the clients of the large APIs send, with every template that is at hand.

Without `TREADLE_TEST_DATA` only templates that are written here: each has the rule of a real one.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_templates.table import make_tokenizer
from treadle.agent_loop import Message, RenderError, SetupError, ToolCall, ToolSpec
from treadle.agent_loop.capture.template_fit import TemplateFit
from treadle.agent_loop.hf import HfRenderer

DATA = os.environ.get("TREADLE_TEST_DATA")
FILES = sorted(Path(DATA, "chat_templates").glob("*.jinja")) if DATA else []
_MESSAGE = (
    "<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
)
_CHAT = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}RULE"
    f"{_MESSAGE}" + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RULES = {
    "anything goes": "",
    "only the first message is a system message (Qwen3.5)": (
        "{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    ),
    "later system messages are left out (gpt-oss)": (
        "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"
    ),
    "no system message, and roles take turns (Gemma 2)": (
        "{% if m.role == 'system' or (m.role == 'user' and loop.previtem"
        " and loop.previtem.role == 'user') %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
    ),
    "no preamble beside reasoning (gpt-oss)": (
        "{% if m.tool_calls and m.content and m.reasoning_content %}"
        "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    ),
}
TOOL = ToolSpec(name="probe", description="Answers.")
CALL = ToolCall(id="call_0", name="probe", arguments={})
ROLES = {"s": "system", "u": "user", "a": "assistant"}
WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf")


def _bytes(template: str) -> HfRenderer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>"
    )
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = template
    return HfRenderer(tokenizer, parser="qwen3")


def _shown(renderer: HfRenderer, roles: str) -> bool:
    """Returns whether the template shows every message; raises what it refuses."""
    words = WORDS[: len(roles)]
    chat = [
        Message(role=ROLES[role], content=word)  # type: ignore[arg-type]
        for role, word in zip(roles, words, strict=True)
    ]
    fitted = TemplateFit(renderer).opening(chat)
    try:
        ids = renderer.render(fitted, tools=()).ids
    except RenderError:  # some templates refuse a chat without tools
        ids = renderer.render(fitted, tools=(TOOL,)).ids
    text = renderer.decode(ids)
    return all(text.count(word) == 1 for word in words)


@pytest.mark.parametrize("rule", RULES)
def test_what_agents_send_is_shown_whatever_the_rule(rule: str) -> None:
    """Found by reports: Claude Code's second system message ended it with Qwen3.5."""
    renderer = _bytes(_CHAT.replace("RULE", RULES[rule]))
    for roles in ("su", "ssu", "us", "sus", "suaus", "suasu", "ssuasus", "uu"):
        assert _shown(renderer, roles), (rule, roles)
    turn = Message(role="assistant", content="bravo", reasoning="charlie", tool_calls=(CALL,))
    result = Message(role="tool", content="delta", tool_call_id="call_0", name="probe")
    chat = (Message(role="user", content="alpha"), turn, result)
    fitted = TemplateFit(renderer).without_preambles(chat)
    text = renderer.decode(renderer.render(fitted, tools=(TOOL,)).ids)
    assert all(text.count(word) == 1 for word in WORDS[:4]), (rule, text)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_agents_send_is_shown_or_refused_by_a_rule(file: Path) -> None:
    assert DATA is not None
    tokenizer = make_tokenizer(Path(DATA, "tokenizers/tiny"), file.stem, file.read_text())
    try:
        renderer = HfRenderer(tokenizer)
    except SetupError:
        pytest.skip("no renderer takes it")
    renderer.template.shows_tools, renderer._tool_problem = True, None
    for roles in ("su", "ssu", "us", "sus", "suaus", "suasu", "ssuasus", "uu"):
        try:
            assert _shown(renderer, roles), roles
        except RenderError as refused:
            assert "TemplateError: " in str(refused), (roles, refused)
