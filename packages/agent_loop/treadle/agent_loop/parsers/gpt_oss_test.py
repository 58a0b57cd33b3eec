"""Tests of the harmony format: channels, recipients, and headers that the models damage."""

import pytest

from treadle.agent_loop import ToolCall
from treadle.agent_loop.parsers import parser_named

PARSER = parser_named("gpt_oss")
THOUGHT = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=functions.f",
        " to=functions.f<|channel|>commentary json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        "<|channel|>analysis to=functions.f code",
        "<|channel|>commentary\u202fto=functions.f",
        "<|channel|>commentary to=functions.f<|channel|>commentary",
        "<|channel|>commentary to=f",
    ],
)
def test_a_message_to_a_recipient_is_a_call(header: str) -> None:
    for text in (
        f'{THOUGHT}{header}<|message|>{{"a": 1}}',
        f'{header}<|message|>{{"a": 1}}<|call|>',
    ):
        parsed = PARSER.parse(text, prompt_end="<|start|>assistant")
        assert [(c.name, c.arguments) for c in parsed.calls] == [("f", {"a": 1})]
        assert (parsed.content, parsed.malformed) == ("", ())


def test_a_message_of_a_tool_is_no_call() -> None:
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    made_up = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>"
    parsed = PARSER.parse(THOUGHT + call + made_up)
    assert [(c.name, c.arguments) for c in parsed.calls] == [("f", {"a": 1})]
    assert (parsed.content, parsed.malformed) == ("{}", ())


def test_channels_are_told_apart() -> None:
    text = (
        f"{THOUGHT}<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
        "<|channel|>analysis<|message|>Ah.<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is 42.<|return|>"
    )
    parsed = PARSER.parse(text)
    assert parsed.reasoning == "Let me think.\nAh."
    assert parsed.content == "I look it up.\nIt is 42."


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>analysis<|message|>Let me", "Let me", ""),
        ("<|channel|>analysis", "", ""),
        ("<|channel|>final<|message|>It is", "", "It is"),
        ("It is 42.", "", "It is 42."),
        ("Write to=functions.f there.", "", "Write to=functions.f there."),
        ("<|channel|>?? commentary?<|message|>It is 42.<|end|>", "", "It is 42."),
        ("<|channel|>?? It is 42.<|end|>", "", "<|channel|>?? It is 42."),
        ("", "", ""),
    ],
)
def test_damaged_and_cut_messages_cost_no_text(text: str, reasoning: str, content: str) -> None:
    parsed = PARSER.parse(text)
    assert (parsed.reasoning, parsed.content, parsed.calls) == (reasoning, content, ())


@pytest.mark.parametrize(
    ("header", "body", "reason", "name"),
    [
        (" to=functions.f", "<|message|>{", "Expecting property name", "f"),
        (" to=functions.f", "<|message|>{} {}", "extra data after the JSON object: '{}'", "f"),
        (" to=functions.f", "<|message|>[]", "must be a JSON object, got an array", "f"),
        (" to=functions.f", "<|message|>", "Expecting value at character 0", "f"),
        (" to=functions.", "<|message|>{}", "the call has no name", None),
        (" to=functions.f", "", "the call has no <|message|>", "f"),
        (" to=python", "<|message|>print(1)", "Expecting value at character 0", "python"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(
    header: str, body: str, reason: str, name: str | None
) -> None:
    call = f"<|start|>assistant<|channel|>commentary{header}{body}<|call|>"
    parsed = PARSER.parse(f"{THOUGHT.removesuffix('<|start|>assistant')}{call}")
    (bad,) = parsed.malformed
    assert reason in bad.reason
    assert (bad.text, bad.name, parsed.content) == (call, name, call)


def test_a_turn_ends_with_a_call_or_a_return() -> None:
    assert PARSER.stop_tokens == ("<|call|>", "<|return|>")


def test_what_the_format_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds '<\|end\|>'"):
        PARSER.render("a <|end|> b", ())
    with pytest.raises(ValueError, match="cannot write the name 'f g'"):
        PARSER.render("", [ToolCall(id="c", name="f g", arguments={})])
