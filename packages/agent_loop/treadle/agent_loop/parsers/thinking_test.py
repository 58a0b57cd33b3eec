"""Tests of reasoning: who opened it, where it ends, and what is left."""

import pytest

from treadle.agent_loop.parsers import parser_named

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "prompt_end", "reasoning", "content"),
    [
        ("<think>\nso\n</think>\n\nYes.", "assistant\n", "so", "Yes."),
        ("\n<think>so</think>Yes.", "assistant\n", "so", "Yes."),
        ("so\n</think>\n\nYes.", "assistant\n<think>\n", "so", "Yes."),
        ("<think>\nso\n</think>\n\nYes.", "assistant\n<think>\n", "so", "Yes."),
        ("so\n</think>\n\nYes.", "", "so", "Yes."),
        ("Yes.", "", "", "Yes."),
        ("Yes.", "assistant\n", "", "Yes."),
        ("Yes.", "assistant\n<think>\n\n</think>\n\n", "", "Yes."),
        ("\n\nYes.", "assistant\n<think>\n\n</think>", "", "Yes."),
        ("</think>\n\nYes.", "assistant\n", "", "Yes."),
        # Without an opening there is no reasoning, whatever is closed.
        ("Yes. </think> No.", "assistant\n", "", "Yes. </think> No."),
        # Only the first closing mark counts.
        ("<think>a</think>b</think>c", "assistant\n", "a", "b</think>c"),
        # It was cut while it thought.
        ("so", "assistant\n<think>\n", "so", ""),
        ("<think>\nso", "assistant\n", "so", ""),
        ("<think>", "assistant\n", "", ""),
    ],
)
def test_reasoning_is_set_apart(text: str, prompt_end: str, reasoning: str, content: str) -> None:
    parsed = parser_named("qwen3").parse(text, prompt_end=prompt_end)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_a_call_that_the_model_only_thinks_of_is_none() -> None:
    parsed = parser_named("qwen3").parse(f"<think>{CALL}</think>{CALL}")
    assert (len(parsed.calls), parsed.reasoning) == (1, CALL)
    assert parsed.call_starts == (len(f"<think>{CALL}</think>"),)
    parsed = parser_named("qwen3").parse(f"I call {CALL}", prompt_end="<think>\n")
    assert (parsed.calls, parsed.content) == ((), "")


def test_families_that_write_no_line_feeds_keep_those_of_the_model() -> None:
    parsed = parser_named("deepseek").parse("\nso\n</think>\n\nYes.", prompt_end="<think>")
    assert (parsed.reasoning, parsed.content) == ("\nso\n", "\n\nYes.")


def test_a_parser_without_reasoning_leaves_it_in_the_content() -> None:
    parsed = parser_named("hermes").parse("<think>so</think>Yes.")
    assert (parsed.reasoning, parsed.content) == (None, "<think>so</think>Yes.")


def test_reasoning_cannot_hold_its_closing_mark() -> None:
    with pytest.raises(ValueError, match="cannot contain its own closing mark '</think>'"):
        parser_named("qwen3").render("", (), reasoning="a</think>b")
