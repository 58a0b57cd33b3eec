"""Tests of the kimi parser: ids that name the tool, and what it says of others."""

from collections.abc import Sequence

import pytest

from treadle.agent_loop import ToolCall, ToolSpec
from treadle.agent_loop.parsers import parser_named

PARSER = parser_named("kimi")
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def call(call_id: str, arguments: str = "{}") -> str:
    return f"{BEGIN}{call_id}{ARGUMENTS}{arguments}{END}"


def test_an_id_is_kept_as_the_model_wrote_it() -> None:
    text = call("functions.f:7") + call(" g:0 ") + call("functions.web.search:1")
    calls = PARSER.parse(text).calls
    assert [c.id for c in calls] == ["functions.f:7", "g:0", "functions.web.search:1"]
    assert [c.name for c in calls] == ["f", "g", "web.search"]


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        *((call_id, "f") for call_id in ("functions.f", "f", "f:", "functions.f:7")),
        *((call_id, "f") for call_id in ("functions.f:a1b2", "f:call-7", "f-call-3")),
        ("f.web_search-call-3", "web_search"),
        ("call_7", None),
    ],
)
def test_an_id_that_names_a_tool_in_another_way_is_read_and_kept(
    call_id: str, name: str | None
) -> None:
    def tool(name: str, *keys: str) -> ToolSpec:
        properties = {key: {"type": "integer"} for key in keys}
        parameters = {"type": "object", "properties": properties, "required": [*keys]}
        return ToolSpec(name=name, description="", parameters=parameters)

    def named(tools: Sequence[ToolSpec]) -> list[tuple[str, str]]:
        parsed = PARSER.parse(call(call_id, '{"a": 1}'), tools=tools)
        return [(c.id, c.name) for c in parsed.calls]

    tools = [tool("f", "a"), tool("web_search", "a")]
    assert named(tools) == ([] if name is None else [(call_id, name)])
    if name is None:  # then the keys tell which is meant
        assert named([tool("g", "a"), tool("h", "b")]) == [(call_id, "g")]


def test_an_id_that_is_used_twice_is_replaced() -> None:
    calls = PARSER.parse(call("functions.f:0") * 3).calls
    assert [c.id for c in calls] == ["functions.f:0", "functions.f:1", "functions.f:2"]


@pytest.mark.parametrize(
    ("text", "reason", "name"),
    [
        (call("functionsf5"), "must be functions.NAME:NUMBER, got 'functionsf5'", None),
        (call("call_abc"), "must be functions.NAME:NUMBER, got 'call_abc'", None),
        (f"{BEGIN}functions.f:0{{}}{END}", "must be functions.NAME:NUMBER", None),
        (f"{BEGIN}functions.f:0{END}", "the id is not followed by", "f"),
        (call("functions.f:0", "[]"), "must be a JSON object, got an array", "f"),
        (call("functions.f:0", ""), "Expecting value at character 0 of its JSON", "f"),
        (call("functions.f:0", "{} x"), "the arguments are not followed by", "f"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, reason: str, name: str | None) -> None:
    (bad,) = PARSER.parse(f"a {text} b").malformed
    assert reason in bad.reason
    assert (bad.text, bad.name) == (text, name)


def test_a_bad_call_is_answered_under_the_id_that_the_model_wrote() -> None:
    (bad,) = PARSER.parse(call("functionsf5")).malformed
    assert bad.id == "functionsf5"


def test_the_marks_around_all_calls_may_be_singular_or_missing() -> None:
    text = f"<|tool_call_section_begin|>{call('f:0')}<|tool_call_section_end|>"
    assert PARSER.parse(text).content == PARSER.parse(call("f:0")).content == ""


def test_an_id_that_does_not_name_its_tool_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be functions\.f:NUMBER"):
        PARSER.render("", [ToolCall(id="call_0", name="f", arguments={})])
