"""Tests of the kimi_k3 parser: elements around everything, and what it says of broken ones."""

import pytest

from treadle.agent_loop import ToolCall
from treadle.agent_loop.parsers import parser_named

PARSER = parser_named("kimi_k3")
HEAD, END = '<|open|>call tool="f" index="1"<|sep|>', "<|close|>call<|sep|>"
ARGUMENT_END = "<|close|>argument<|sep|>"


def argument(kind: str, text: str) -> str:
    return f'<|open|>argument key="a" type="{kind}"<|sep|>{text}{ARGUMENT_END}'


def test_an_answer_is_what_is_in_its_element() -> None:
    text = "so<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    parsed = PARSER.parse(f"{text}<|close|>message<|sep|>", prompt_end="<|open|>think<|sep|>")
    assert (parsed.reasoning, parsed.content) == ("so", "Yes.")
    parsed = PARSER.parse("Yes.<|close|>response<|sep|>", prompt_end="<|open|>response<|sep|>")
    assert (parsed.reasoning, parsed.content) == ("", "Yes.")


def test_arguments_may_be_one_block_of_json() -> None:
    block = '<|open|>json type="object"<|sep|>{"a": [1]}<|close|>json<|sep|>'
    assert PARSER.parse(f"{HEAD}{block}{END}").calls[0].arguments == {"a": [1]}


@pytest.mark.parametrize(
    ("text", "reason", "name"),
    [
        (f"<|open|>call f<|sep|>{END}", "the call must begin with", None),
        (f"{HEAD}x{END}", "expected <|open|>argument ", "f"),
        (f"{HEAD}{argument('number', 'x')}{END}", "'x' is not a number, true", "f"),
        (f"{HEAD}{argument('number', '1 2')}{END}", "'1 2' is not a number", "f"),
        (f"{HEAD}{argument('number', '1') * 2}{END}", "given twice", "f"),
        (f'{HEAD}<|open|>argument key="a" type="string"<|sep|>x{END}', "is not closed by", "f"),
        (HEAD, "the call is not closed by <|close|>call<|sep|>", "f"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, reason: str, name: str | None) -> None:
    (bad,) = PARSER.parse(text).malformed
    assert reason in bad.reason
    assert (bad.text, bad.name) == (text, name)


def test_names_are_escaped() -> None:
    call = ToolCall(id="call_0", name='f"&quot;', arguments={'a&"': 1})
    assert PARSER.parse(PARSER.render("", [call])).calls == (call,)
    with pytest.raises(ValueError, match="the format cannot write"):
        PARSER.render("", [ToolCall(id="c", name="f", arguments={"a": "<|close|>"})])
