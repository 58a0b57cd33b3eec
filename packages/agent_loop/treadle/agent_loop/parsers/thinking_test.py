"""Tests of reasoning: who opened it, where it ends, and what is left."""

import pytest

from treadle.agent_loop.parsers import UnclosedReasoning, parser_named
from treadle.agent_loop.parsers.format_parser import FormatParser
from treadle.agent_loop.parsers.testing import SAMPLES, TOOL, Sample

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
    parsed = parser_named("qwen3").parse(f"I call {CALL} or not", prompt_end="<think>\n")
    assert (parsed.calls, parsed.content) == ((), "")


def _block(sample: Sample) -> tuple[str, str, str, str]:
    """The calls of a sample, and what opens, closes and follows reasoning in its format."""
    start = sample.text.index(sample.content or sample.first) if sample.content else 0
    calls = sample.text[start + len(sample.content) :] if sample.content else sample.text
    parser = parser_named(sample.parser)
    assert isinstance(parser, FormatParser)
    thinking = parser.thinking
    assert thinking is not None
    if thinking.close in calls:
        calls = calls.partition(thinking.close)[2]
    return calls.strip(), thinking.open, thinking.close, "It is sunny."


FORMATS = [sample for sample in SAMPLES if sample.parser != "gpt_oss"]
every_format = pytest.mark.parametrize(
    "sample", FORMATS, ids=lambda sample: f"{sample.parser}-{sample.models}"
)


@every_format
def test_a_call_rehearsed_in_reasoning_is_none_wherever_the_reasoning_is(sample: Sample) -> None:
    calls, opening, closing, answer = _block(sample)
    parser = parser_named(sample.parser)
    rehearsed = f"I could write {calls} but no."
    for text, prompt_end in (
        (f"{opening}{rehearsed}{closing}{answer}", "assistant"),
        (f"{rehearsed}{closing}{answer}", f"assistant{opening}"),
        (f"{rehearsed}{closing}{answer}", ""),
        (f"a{closing}b{opening}{rehearsed}{closing}{answer}", f"assistant{opening}"),
        (f"Before it.{opening}{rehearsed}{closing}{answer}", "assistant"),
        (f"{opening}{rehearsed}", "assistant"),
        (f"Before it.{opening}{rehearsed}", "assistant"),
    ):
        parsed = parser.parse(text, tools=[TOOL], prompt_end=prompt_end)
        assert (parsed.calls, parsed.malformed) == ((), ()), text
    if sample.parser != "llama3_json":  # a text before a call makes it none
        text = f"Before it.{opening}{rehearsed}{closing}{answer}{calls}"
        made = parser.parse(text, tools=[TOOL], prompt_end="assistant").calls
        assert [dict(call.arguments) for call in made] == list(sample.calls)


@every_format
def test_a_call_that_ends_a_turn_whose_reasoning_is_not_closed_follows_the_rule(
    sample: Sample,
) -> None:
    calls, opening, closing, _ = _block(sample)
    for text in (f"{opening}{calls}", f"{opening}Hm. {calls}"):
        if sample.parser == "llama3_json" and "Hm" in text:
            continue  # a text before a call makes it none
        made = parser_named(sample.parser).parse(text, tools=[TOOL], prompt_end="assistant")
        assert [dict(call.arguments) for call in made.calls] == list(sample.calls)
        assert made.malformed == ()
        refused = parser_named(sample.parser, unclosed=UnclosedReasoning.MALFORMED).parse(
            text, tools=[TOOL], prompt_end="assistant"
        )
        assert (refused.calls, len(refused.malformed)) == ((), len(sample.calls))
        assert closing in refused.malformed[0].reason


def test_a_mark_of_reasoning_in_an_argument_is_a_text() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"text": "<think>"}}\n</tool_call>'
    parsed = parser_named("qwen3").parse(f"<think>so</think>{call}\n{call}", prompt_end="x")
    assert [dict(found.arguments) for found in parsed.calls] == [{"text": "<think>"}] * 2


def test_an_analysis_of_gpt_oss_that_is_not_closed_follows_the_rule() -> None:
    analysis = "<|channel|>analysis<|message|>I call."
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    (made,) = parser_named("gpt_oss").parse(analysis + call).calls
    assert (made.name, made.arguments) == ("f", {"a": 1})
    strict = parser_named("gpt_oss", unclosed=UnclosedReasoning.MALFORMED)
    parsed = strict.parse(analysis + call)
    assert (parsed.calls, parsed.malformed[0].name, parsed.reasoning) == ((), "f", "I call.")
    rehearsed = f"{analysis}{call}<|end|><|start|>assistant<|channel|>final<|message|>No."
    assert (parser_named("gpt_oss").parse(rehearsed).calls, strict.parse(rehearsed).malformed) == (
        (),
        (),
    )


def test_families_that_write_no_line_feeds_keep_those_of_the_model() -> None:
    parsed = parser_named("deepseek").parse("\nso\n</think>\n\nYes.", prompt_end="<think>")
    assert (parsed.reasoning, parsed.content) == ("\nso\n", "\n\nYes.")


def test_a_parser_without_reasoning_leaves_it_in_the_content() -> None:
    parsed = parser_named("hermes").parse("<think>so</think>Yes.")
    assert (parsed.reasoning, parsed.content) == (None, "<think>so</think>Yes.")


def test_reasoning_cannot_hold_its_closing_mark() -> None:
    with pytest.raises(ValueError, match="cannot contain its own closing mark '</think>'"):
        parser_named("qwen3").render("", (), reasoning="a</think>b")
