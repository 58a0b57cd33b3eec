"""Tests of the gemma4 parser: what models write beside the template, and what is wrong with it."""

import pytest

from treadle.agent_loop import ToolCall
from treadle.agent_loop.parsers import parser_named
from treadle.agent_loop.parsers.testing import TOOL

PARSER = parser_named("gemma4")


def call(inside: str, name: str = "get_weather") -> str:
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", {}),
        ("city:Rome, days: 3", {"city": "Rome", "days": 3}),
        ("zip:3", {"zip": "3"}),
        ("flag:None", {"flag": None}),
        ("other:null", {"other": None}),
        ('<|"|>a,b<|"|>:1.5', {"a,b": 1.5}),
        (
            "deep:{a:[],b:{},c:Rome,d:[x,true]}",
            {"deep": {"a": [], "b": {}, "c": "Rome", "d": ["x", True]}},
        ),
        ('city:<|"|>{a:1}<tool_call|><|"|>', {"city": "{a:1}<tool_call|>"}),
    ],
)
def test_values_without_marks_and_nested_ones(inside: str, arguments: dict[str, object]) -> None:
    (found,) = PARSER.parse(call(inside), tools=[TOOL]).calls
    assert found.arguments == arguments


@pytest.mark.parametrize(
    ("text", "reason", "name"),
    [
        ("<|tool_call>get_weather{}<tool_call|>", "must begin with <|tool_call>call:NAME{", None),
        (call("city"), "'city' has no value", "get_weather"),
        (call("city:"), "expected a value, got '}", "get_weather"),
        (call("city:[1"), "expected , or ]", "get_weather"),
        (call('city:<|"|>Rome'), 'not closed by <|"|>', "get_weather"),
        (call("a:1,a:2"), "'a' is given twice", "get_weather"),
        (call("a:" + "[" * 80), "nested too deeply", "get_weather"),
        ("<|tool_call>call:f{a:1}", "not closed by <tool_call|>", "f"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, reason: str, name: str | None) -> None:
    (bad,) = PARSER.parse(text).malformed
    assert reason in bad.reason
    assert (bad.text, bad.name) == (text, name)


def test_a_mention_in_prose_is_prose_and_the_turn_ends_before_results() -> None:
    parsed = PARSER.parse("Use <|tool_call> to call.")
    assert (parsed.malformed, parsed.content) == ((), "Use <|tool_call> to call.")
    assert PARSER.stop_tokens == ("<|tool_response>",)


def test_what_the_format_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="holds"):
        PARSER.render("", [ToolCall(id="c", name="f", arguments={"a": '<|"|>'})])
    with pytest.raises(ValueError, match=r"cannot write the name 'f\{'"):
        PARSER.render("", [ToolCall(id="c", name="f{", arguments={})])
