"""Tests of the lfm2 parser: texts that nobody escaped, and what is wrong with a call."""

import pytest

from treadle.agent_loop import ToolCall
from treadle.agent_loop.parsers import parser_named

PARSER = parser_named("lfm2")


def calls(inside: str) -> str:
    return f"<|tool_call_start|>[{inside}]<|tool_call_end|>"


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("f()", {}),
        ("f(a='it's', b=\"x\")", {"a": "it's", "b": "x"}),
        ("f(command='sed -n '1,4p' x')", {"command": "sed -n '1,4p' x"}),
        (r"f(a='it\'s', b='a\\b\n\d')", {"a": "it's", "b": "a\\b\n\\d"}),
        (r"f(a='\u00e9\x41\U0001f600', b='\ud83d\ude00')", {"a": "éA😀", "b": "😀"}),
        (
            "f(from=-1, b=[1, (2,), {'k': True}], c=null)",
            {"from": -1, "b": [1, [2], {"k": True}], "c": None},
        ),
        ("f(\n  a = 1,\n)", {"a": 1}),
        ("f(a='two\nlines')", {"a": "two\nlines"}),
    ],
)
def test_arguments(inside: str, arguments: dict[str, object]) -> None:
    (found,) = PARSER.parse(calls(inside)).calls
    assert (found.name, found.arguments) == ("f", arguments)


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("f(a=1", "expected ), got ']'"),
        ("f(1)", "expected ARGUMENT=VALUE, got '1)]'"),
        ("f(a=1, a=2)", "'a' is given twice"),
        ("f(a=x)", "expected a text in quotes, a number, True, False or None, got 'x'"),
        ("f(a=1e999)", "True, False or None, got '1e999'"),
        ("f(a='x)", "a text is not closed by '"),
        ("f(a={1: 2})", "the key 1 of a dictionary is not a string"),
        (r"f(a='\ud800')", "half of a character"),
        ("f(a=" + "[" * 80 + ")", "nested too deeply"),
        ("f(a=open('x'))", "or None, got 'open'"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(inside: str, reason: str) -> None:
    parsed = PARSER.parse(calls(f"good(), {inside}"))
    assert [c.name for c in parsed.calls] == ["good"]
    (bad,) = parsed.malformed
    assert reason in bad.reason
    assert bad.name == "f"


def test_a_list_that_was_cut_and_a_mention() -> None:
    (bad,) = PARSER.parse("<|tool_call_start|>[f(a=1").malformed
    assert bad.text == "f(a=1"
    parsed = PARSER.parse("Begin with <|tool_call_start|> then.")
    assert (parsed.malformed, parsed.content) == ((), "Begin with <|tool_call_start|> then.")


def test_what_the_format_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot write the name 'a b'"):
        PARSER.render("", [ToolCall(id="c", name="f", arguments={"a b": 1})])
    with pytest.raises(ValueError, match=r"holds .*tool_call_end"):
        PARSER.render("", [ToolCall(id="c", name="f", arguments={"a": "<|tool_call_end|>"})])
