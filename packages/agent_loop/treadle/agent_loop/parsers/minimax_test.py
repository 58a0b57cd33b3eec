"""Tests of the parsers for MiniMax-M1 and M3; M2's is tested with its grammar, `invoke`."""

import pytest

from treadle.agent_loop import ToolCall, ToolSpec
from treadle.agent_loop.parsers import parser_named
from treadle.agent_loop.parsers.testing import TOOL

M1, M3 = parser_named("minimax_m1"), parser_named("minimax_m3")
NS = "]<]minimax[>["
SHAPES = ToolSpec(
    name="f",
    description="",
    parameters={
        "type": "object",
        "properties": {
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}},
            "none": {"type": "array"},
            "box": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
        "$defs": {
            "point": {
                "anyOf": [
                    {"type": "null"},
                    {"type": "object", "properties": {"x": {"type": "string"}}},
                ]
            }
        },
    },
)


def m3(inside: str, name: str = "f") -> str:
    body = inside.replace("<", f"{NS}<")
    return f'{NS}<tool_call>\n{NS}<invoke name="{name}">{body}{NS}</invoke>\n{NS}</tool_call>'


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", {}),
        ("<points><item><x>1</x></item></points>", {"points": [{"x": "1"}]}),
        ("<none></none>", {"none": []}),
        ("<box><item>3</item></box>", {"box": {"item": "3"}}),
        ("<any><item>3</item><item>a</item></any>", {"any": [3, "a"]}),
        ("<any>\n<a>1</a>\n<b>x</b>\n</any>", {"any": {"a": 1, "b": "x"}}),
        ('<any>{"a": null}</any>', {"any": {"a": None}}),
    ],
)
def test_elements_are_arrays_and_objects_as_the_schema_says(
    inside: str, arguments: dict[str, object]
) -> None:
    (call,) = M3.parse(m3(inside), tools=[SHAPES], prompt_end="x").calls
    assert call.arguments == arguments


def test_a_text_may_hold_the_marks_of_other_formats() -> None:
    text = f"{NS}<city><b>Rome</b> </invoke>{NS}</city>"
    block = f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{text}{NS}</invoke>\n{NS}</tool_call>'
    (call,) = M3.parse(block, tools=[TOOL], prompt_end="x").calls
    assert call.arguments == {"city": "<b>Rome</b> </invoke>"}


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("x", f"expected {NS}<NAME> or {NS}</invoke>, got 'x"),
        ("<a>1", f"expected {NS}</a>, got"),
        ("<a>1<b>2</b></a>", f"expected {NS}</a>, got"),
        ("<a><b>2</b>1</a>", "a text beside elements: '1'"),
        ("<a>1</a><a>2</a>", "the argument 'a' is given twice"),
        ("<a><b>1</b><b>2</b></a>", "the element 'b' is given twice"),
        ("<a>" * 80, "nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(inside: str, reason: str) -> None:
    parsed = M3.parse(m3(inside), prompt_end="x")
    (bad,) = parsed.malformed
    assert reason in bad.reason
    assert (bad.name, parsed.calls) == ("f", ())


def test_arguments_are_elements_where_elements_can_say_them() -> None:
    arguments = {"a": {"b": [1, "x"]}, "c": {"d": "3"}, "e": [None], "f": []}
    text = M3.render("", [ToolCall(id="c", name="f", arguments=arguments)])
    assert f"{NS}<a>{NS}<b>{NS}<item>1{NS}</item>{NS}<item>x{NS}</item>{NS}</b>{NS}</a>" in text
    assert f'{NS}<c>{{"d": "3"}}{NS}</c>{NS}<e>[null]{NS}</e>{NS}<f>[]{NS}</f>' in text
    for name in ("tool_call", "a b", ""):
        with pytest.raises(ValueError, match="cannot write the name"):
            M3.render("", [ToolCall(id="c", name="f", arguments={name: 1})])


def test_a_bad_line_of_m1_spoils_no_other_line() -> None:
    good = '{"name": "f", "arguments": {}}'
    text = f"So.\n<tool_calls>\n{good}\n{{'name': 'g'}}\n{good} and\n{good}\n</tool_calls>"
    parsed = M1.parse(text)
    assert [call.name for call in parsed.calls] == ["f", "f"]
    assert [bad.text for bad in parsed.malformed] == ["{'name': 'g'}", f"{good} and"]
    assert "extra data after the JSON object of a call: ' and" in parsed.malformed[1].reason
    assert M1.parse("<tool_calls> are calls").malformed == ()
    (bad,) = M1.parse('<tool_calls>\n{"name": "f", "argu').malformed
    assert bad.name == "f"
