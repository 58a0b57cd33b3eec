"""Tests of the parsers for Cohere's models."""

import pytest

from treadle.agent_loop import ToolCall
from treadle.agent_loop.parsers import parser_named

PARSER = parser_named("cohere_command3")
GOOD = '{"tool_call_id": "7", "tool_name": "f", "parameters": {}}'


def actions(inside: str) -> str:
    return f"<|START_ACTION|>[{inside}]<|END_ACTION|>"


def test_ids_are_kept_and_missing_ones_are_numbers() -> None:
    missing = GOOD.replace('"tool_call_id": "7", ', "")
    parsed = PARSER.parse(actions(f"{GOOD},\n {missing}"))
    assert [call.id for call in parsed.calls] == ["7", "1"]


def test_the_answer_is_what_stands_between_its_marks() -> None:
    for name, mark in (("cohere_command3", "RESPONSE"), ("cohere_command4", "TEXT")):
        text = f"<|START_{mark}|>Six.<|END_{mark}|>"
        assert parser_named(name).render("Six.", []) == text
        for reader in ("cohere_command3", "cohere_command4"):
            parsed = parser_named(reader).parse(text, prompt_end="<|END_THINKING|>")
            assert (parsed.content, parsed.reasoning) == ("Six.", "")


@pytest.mark.parametrize(
    ("text", "reason", "name"),
    [
        (actions('{"tool_name": "f"}'), "the call has no 'parameters'", "f"),
        (actions('{"name": "f", "parameters": {}}'), "the call has no 'tool_name'", None),
        (actions("f()"), "Expecting value", None),
        (
            f"<|START_ACTION|>{GOOD}<|END_ACTION|>",
            'must be a JSON list, as [{"tool_name": ...',
            None,
        ),
        (f"<|START_ACTION|>[{GOOD}", "Expecting ',' delimiter", None),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, reason: str, name: str | None) -> None:
    parsed = PARSER.parse(text)
    (bad,) = parsed.malformed
    assert reason in bad.reason
    assert (bad.name, parsed.calls) == (name, ())


def test_an_answer_with_the_marks_of_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"END_RESPONSE"):
        PARSER.render("a<|END_RESPONSE|>b", [ToolCall(id="0", name="f", arguments={})])
