"""Tests of the deepseek parser: both ways of writing, and what it says of the rest."""

# ruff: noqa: RUF001 - the bars are the model's

import pytest

from treadle.agent_loop.parsers import parser_named

PARSER = parser_named("deepseek")
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
GOOD = f'{BEGIN}g{SEPARATOR}{{"a": "x"}}{END}'


@pytest.mark.parametrize(
    ("body", "reason", "name"),
    [
        ("f", "must be written as NAME<｜tool▁sep｜>ARGUMENTS", None),
        (f" {SEPARATOR}{{}}", "the call has no name", None),
        (f"f{SEPARATOR}", "Expecting value at character 0", "f"),
        (f"f{SEPARATOR}[1]", "the arguments must be a JSON object, got an array", "f"),
        (f'f{SEPARATOR}{{"a": 1}} so', "not followed by <｜tool▁call▁end｜>", "f"),
        (f'f{SEPARATOR}{{"a": ', "Expecting value at character 6", "f"),
        (f"function{SEPARATOR}f\n```json\n{{a}}\n```", "property name enclosed", "f"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body: str, reason: str, name: str | None) -> None:
    parsed = PARSER.parse(f"a {BEGIN}{body}{END}{GOOD}")
    (bad,) = parsed.malformed
    assert reason in bad.reason
    assert (bad.text, bad.name) == (f"{BEGIN}{body}{END}", name)
    assert [call.name for call in parsed.calls] == ["g"]


def test_a_call_that_is_not_closed_ends_where_the_next_begins() -> None:
    parsed = PARSER.parse(f'{BEGIN}f{SEPARATOR}{{"a": 1{GOOD}')
    assert parsed.malformed[0].text == f'{BEGIN}f{SEPARATOR}{{"a": 1'
    assert [call.name for call in parsed.calls] == ["g"]


def test_a_mark_inside_a_text_ends_nothing() -> None:
    parsed = PARSER.parse(f'{BEGIN}f{SEPARATOR}{{"a": "{END}{BEGIN}"}}{END}')
    assert parsed.calls[0].arguments == {"a": END + BEGIN}


def test_a_tool_named_function_is_not_taken_for_the_type() -> None:
    parsed = PARSER.parse(f'{BEGIN}function{SEPARATOR}{{"a": 1}}{END}')
    assert [(call.name, call.arguments) for call in parsed.calls] == [("function", {"a": 1})]
