"""Tests of the llama3_json parser: which JSON is a call."""

import pytest

from treadle.agent_loop.parsers import parser_named

PARSER = parser_named("llama3_json")
GOOD = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"\n{GOOD}\n",
        f"<|python_tag|>{GOOD}",
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "arguments": {"a": 1}}',
    ],
)
def test_a_turn_that_is_a_call(text: str) -> None:
    parsed = PARSER.parse(text)
    assert [(c.name, c.arguments) for c in parsed.calls] == [("f", {"a": 1})]
    assert (parsed.content, parsed.malformed) == ("", ())


@pytest.mark.parametrize("between", ["; ", ";", "\n", " ", "<|python_tag|>"])
def test_several_calls(between: str) -> None:
    parsed = PARSER.parse(GOOD + between + GOOD)
    assert (len(parsed.calls), parsed.content) == (2, "")


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        "{x: 1}",
        f"The call is {GOOD}",
        "[1, 2]",
        "",
    ],
)
def test_a_turn_that_is_an_answer(text: str) -> None:
    parsed = PARSER.parse(text)
    assert (parsed.calls, parsed.malformed, parsed.content) == ((), (), text)


@pytest.mark.parametrize(
    ("text", "reason", "name"),
    [
        ('{"name": "f", "parameters": {"a": 1}', "Expecting ',' delimiter", "f"),
        ('{"name": "f", "parameters": "a"}', "'parameters' must be a JSON object", "f"),
        ('{"name": "f", "parameters": {"a": NaN}}', "NaN is not JSON", "f"),
        ('<|python_tag|>{"name": "f"}', "the call has no 'parameters'", "f"),
        ('<|python_tag|>brave_search.call(query="x")', 'expected {"name": ...', None),
        ("<|python_tag|>", 'expected {"name": ...', None),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, reason: str, name: str | None) -> None:
    (bad,) = PARSER.parse(text).malformed
    assert reason in bad.reason
    assert (bad.text, bad.name) == (text, name)


def test_a_text_may_come_before_the_tag() -> None:
    parsed = PARSER.parse(f"I look. <|python_tag|>{GOOD}")
    assert (parsed.content, len(parsed.calls)) == ("I look.", 1)
    assert PARSER.stop_tokens == ("<|eom_id|>",)
