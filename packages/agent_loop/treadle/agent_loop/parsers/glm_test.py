"""Tests of the glm parser: what it says of calls that cannot be read."""

import pytest

from treadle.agent_loop import ToolCall
from treadle.agent_loop.parsers import parser_named

PARSER = parser_named("glm")
GOOD = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("body", "reason", "name"),
    [
        ("", "the call has no name", None),
        ("<arg_key>a</arg_key>", "the call has no name", None),
        ('{"name": "f"}', "the call has no name", None),
        ("f(1)\nx", "expected <arg_key> or </tool_call>, got 'x", "f(1)"),
        ("f<arg_key>a", "<arg_key> is not closed by </arg_key>", "f"),
        ("f<arg_key>a</arg_key>1", "'a' has no <arg_value>", "f"),
        ("f<arg_key>a</arg_key><arg_value>1", "'a' is not closed by </arg_value>", "f"),
        ("f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2, "'a' is given twice", "f"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body: str, reason: str, name: str | None) -> None:
    text = f"a <tool_call>{body}</tool_call> b"
    (bad,) = PARSER.parse(text).malformed
    assert reason in bad.reason
    assert (bad.text, bad.name) == (f"<tool_call>{body}</tool_call>", name)


def test_a_call_that_was_cut_is_malformed() -> None:
    for size in range(len("<tool_call>f\n<arg_key>"), len(GOOD)):
        parsed = PARSER.parse(GOOD[:size])
        assert (parsed.calls, len(parsed.malformed)) == ((), 1), GOOD[:size]


def test_a_mention_in_prose_is_prose() -> None:
    parsed = PARSER.parse("Use <tool_call> to call.")
    assert (parsed.malformed, parsed.content) == ((), "Use <tool_call> to call.")


def test_an_argument_is_not_stripped() -> None:
    text = GOOD.replace(">x<", ">\n x <")
    assert PARSER.parse(text).calls[0].arguments == {"a": "\n x "}


def test_what_the_format_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="holds '</arg_value>'"):
        PARSER.render("", [ToolCall(id="c", name="f", arguments={"a": "</arg_value>"})])
