"""Tests of the qwen3_coder parser: what it forgives, and what it says of the rest."""

import pytest

from treadle.agent_loop import ToolCall
from treadle.agent_loop.parsers import parser_named

PARSER = parser_named("qwen3_coder")
GOOD = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("body", "reason", "name"),
    [
        ('{"name": "f", "arguments": {}}', "must begin with <function=NAME>", None),
        ("<function=>\n</function>", "must begin with <function=NAME>", None),
        ("<function= >\n</function>", "must begin with <function=NAME>", None),
        ("<function=f", "must begin with <function=NAME>", None),
        ("<function=f>\n", "expected <parameter=NAME> or </function>, got '</tool_call>", "f"),
        ("<function=f>\nx\n</function>", "expected <parameter=NAME> or </function>, got 'x", "f"),
        ("<function=f><parameter=a>x</function>", "'a' is not closed by </parameter>", "f"),
        (
            "<function=f><parameter=a>x\n<parameter=b>y</parameter></function>",
            "'a' is not closed by </parameter>",
            "f",
        ),
        ("<function=f>" + "<parameter=a>x</parameter>" * 2 + "</function>", "given twice", "f"),
        ("<function=f></function> so", "the call is not closed by </tool_call>", "f"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body: str, reason: str, name: str | None) -> None:
    text = f"a <tool_call>\n{body}\n</tool_call> b {GOOD}"
    parsed = PARSER.parse(text)
    (bad,) = parsed.malformed
    assert reason in bad.reason
    assert (bad.text, bad.name) == (f"<tool_call>\n{body}\n</tool_call>", name)
    assert [call.arguments for call in parsed.calls] == [{"a": "x"}]


def test_a_call_that_was_cut_is_malformed() -> None:
    for size in range(len("<tool_call>\n<function=f"), len(GOOD)):
        parsed = PARSER.parse(GOOD[:size])
        assert (parsed.calls, len(parsed.malformed)) == ((), 1), GOOD[:size]


def test_a_call_without_its_outer_mark_is_understood() -> None:
    parsed = PARSER.parse("I look. " + GOOD.removeprefix("<tool_call>\n"))
    assert [call.arguments for call in parsed.calls] == [{"a": "x"}]
    assert parsed.content == "I look."
    parsed = PARSER.parse("<function=f>\n<parameter=a>\n</function> and")
    assert parsed.malformed[0].text == "<function=f>\n<parameter=a>\n</function>"


@pytest.mark.parametrize("text", ["Use <tool_call> to call.", "Write <function=NAME> first."])
def test_a_mention_in_prose_is_prose(text: str) -> None:
    parsed = PARSER.parse(text)
    assert (parsed.calls, parsed.malformed, parsed.content) == ((), (), text)


def test_an_argument_may_speak_of_arguments() -> None:
    call = PARSER.parse(GOOD.replace("\nx\n", "\nuse <parameter=name> here\n")).calls[0]
    assert call.arguments == {"a": "use <parameter=name> here"}
    assert PARSER.parse(PARSER.render("", [call])).calls[0].arguments == call.arguments
    with pytest.raises(ValueError, match="the format cannot write"):
        PARSER.render("", [ToolCall(id="c", name="f", arguments={"a": "<parameter=b>"})])


def test_one_line_break_on_either_side_is_the_templates() -> None:
    windows = GOOD.replace("\n", "\r\n")
    assert PARSER.parse(windows).calls[0].arguments == {"a": "x"}
    text = GOOD.replace("\nx\n", "\n\n  x\n\n")
    assert PARSER.parse(text).calls[0].arguments == {"a": "\n  x\n"}
    assert PARSER.parse(GOOD.replace("\nx\n", "x")).calls[0].arguments == {"a": "x"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("f>", {}), ("", {}), (" f", {}), ("f", {"a>": 1}), ("f", {"a": "x</parameter>"})],
)
def test_what_the_format_cannot_say_is_refused(name: str, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the format cannot write"):
        PARSER.render("", [ToolCall(id="c", name=name, arguments=arguments)])
