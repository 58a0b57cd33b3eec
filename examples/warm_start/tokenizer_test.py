import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from calculator.questions import SYSTEM_PROMPT, TEMPLATES
from calculator.recipe import CALCULATOR
from treadle.agent_loop import Message, ToolCall
from treadle.agent_loop.hf import HfRenderer
from treadle.trainer import demo
from warm_start import tokenizer as tokenizer_module
from warm_start.tokenizer import (
    SPECIAL_TOKENS,
    TOOL_TOKENS,
    VOCAB_SIZE,
    build_tokenizer,
    write_tokenizer,
)
from warm_start.train import RECIPES

_DEMO = Path(demo.__file__).parent / "calculator"
_SHIPPED = Tokenizer.from_file(str(_DEMO / "model" / "tokenizer.json"))
_TOOL = CALCULATOR.tool

_TOOL_PROMPT = """\
Be brief.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schema}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@pytest.mark.parametrize("name", RECIPES)
def test_a_rebuild_gives_the_shipped_files_byte_for_byte(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, RECIPES[name])
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for file in written:
        shipped = _DEMO.parent / name / "model" / file
        assert (tmp_path / file).read_bytes() == shipped.read_bytes(), file


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"])))
def test_any_nfc_text_makes_the_round_trip(text: str) -> None:
    normal = _SHIPPED.normalizer.normalize_str(text)
    ids = _SHIPPED.encode(normal).ids
    assert _SHIPPED.decode(ids, skip_special_tokens=False) == normal


@given(st.integers(min_value=0))
def test_every_digit_is_one_token(number: int) -> None:
    digits = str(number)
    assert _SHIPPED.encode(digits).tokens == list(digits)


def test_the_chat_and_tool_marks_are_single_tokens_and_only_the_former_special() -> None:
    marks = (*SPECIAL_TOKENS, *TOOL_TOKENS)
    assert _SHIPPED.get_vocab_size() == VOCAB_SIZE
    ids = [_SHIPPED.encode(mark).ids for mark in marks]
    assert ids == [[VOCAB_SIZE - len(marks) + i] for i in range(len(marks))]
    kept = _SHIPPED.decode([i for (i,) in ids], skip_special_tokens=True)
    assert kept.replace(" ", "") == "".join(TOOL_TOKENS)


def test_words_of_the_prompt_are_single_tokens() -> None:
    questions = [template.text.format(a=7, b=8) for template in TEMPLATES]
    for text in (SYSTEM_PROMPT, json.dumps(_TOOL.as_schema()), *questions):
        pieces = _SHIPPED.pre_tokenizer.pre_tokenize_str(text)
        assert len(_SHIPPED.encode(text).ids) == len(pieces), text


def test_too_little_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "VOCAB_SIZE", 1 << 15)
    with pytest.raises(ValueError, match=r"entries, not 32768; add text to corpus.txt"):
        build_tokenizer(CALCULATOR)


def test_the_template_writes_qwens_tool_chat() -> None:
    renderer = HfRenderer.from_directory(_DEMO / "model")
    call = ToolCall(id="c", name="calculator", arguments={"expression": "1<2"})
    chat = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi & <bye>"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="3", tool_call_id="c"),
        Message(role="tool", content="4", tool_call_id="c"),
        Message(role="assistant", content="Both:", tool_calls=(call, call)),
        Message(role="tool", content="5", tool_call_id="c"),
    )
    written = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1<2"}}\n</tool_call>'
    )
    system = _TOOL_PROMPT.format(schema=json.dumps(_TOOL.as_schema()))
    assert renderer.decode(renderer.render(chat, tools=[_TOOL]).ids) == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nHi & <bye><|im_end|>\n"
        f"<|im_start|>assistant\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>"
        "\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\nBoth:\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_template_has_a_system_message_of_its_own() -> None:
    renderer = HfRenderer.from_directory(_DEMO / "model")
    chat = (Message(role="user", content="Hi"), Message(role="assistant", content="Yes"))
    assert renderer.decode(renderer.render(chat, tools=()).ids) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
