"""Tests of the mistral parser: three ways of writing, and what it says of the rest."""

import pytest

from treadle.agent_loop import ToolCall
from treadle.agent_loop.parsers import parser_named
from treadle.agent_loop.parsers.format_parser import FormatParser
from treadle.agent_loop.parsers.mistral import MistralFormat

PARSER = parser_named("mistral")


def test_ids_are_kept_or_made_as_the_templates_want_them() -> None:
    calls = PARSER.parse("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]g[ARGS]{}").calls
    assert [(c.id, c.name) for c in calls] == [("abcdefghi", "f"), ("call00001", "g")]
    calls = PARSER.parse('[TOOL_CALLS][{"name": "f", "arguments": {}}]').calls
    assert [c.id for c in calls] == ["call00000"]


@pytest.mark.parametrize(
    ("body", "reason", "name"),
    [
        ('f{"a": 1}', "must be written as [TOOL_CALLS]NAME[ARGS]ARGUMENTS", None),
        ("", "must be written as [TOOL_CALLS]NAME[ARGS]ARGUMENTS", None),
        ("f[ARGS]a=1", "Expecting value at character 0 of its JSON", "f"),
        ('f[ARGS]{"a": "x\ny"}', "Invalid control character at character 8 of its JSON", "f"),
        ("f[ARGS]3", "must be a JSON object, got a number", "f"),
        ('f[ARGS]{"a": "x', "Unterminated string", "f"),
        ('[{"name": "f", "arguments": {}}', "Expecting ',' delimiter", None),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body: str, reason: str, name: str | None) -> None:
    parsed = PARSER.parse(f"a [TOOL_CALLS]{body}[TOOL_CALLS]g[ARGS]{{}}")
    (bad,) = parsed.malformed
    assert reason in bad.reason
    assert (bad.text, bad.name) == (f"[TOOL_CALLS]{body}", name)
    assert [call.name for call in parsed.calls] == ["g"]


def test_one_bad_item_of_a_list_spoils_no_other() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}, 3] so'
    parsed = PARSER.parse(text)
    assert [call.name for call in parsed.calls] == ["f"]
    assert [(bad.text, bad.name) for bad in parsed.malformed] == [
        ('{"name": "g"}', "g"),
        ("3", None),
    ]
    assert "the call has no 'arguments'" in parsed.malformed[0].reason
    assert parsed.content.endswith("so")


def test_the_older_kind_is_written_too() -> None:
    parser = FormatParser(MistralFormat(as_list=True))
    call = ToolCall(id="abcdefghi", name="f", arguments={"a": [1]})
    text = parser.render("", [call])
    assert text == '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}, "id": "abcdefghi"}]'
    assert parser.parse(text).calls == (call,)
