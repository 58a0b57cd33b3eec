"""Tests of the truncation of tool texts, through the limits that bound them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import LoopLimits, TruncateSide
from treadle.agent_loop.testing import ByteRenderer


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        (TruncateSide.LEFT, "(truncated)...ghij"),
        (TruncateSide.RIGHT, "abcd...(truncated)"),
        (TruncateSide.MIDDLE, "ab...(truncated)...ij"),
    ],
)
def test_sides_mean_what_verl_means_since_pr_6313(side: TruncateSide, expected: str) -> None:
    limits = LoopLimits(
        max_response_tokens=1, max_tool_response_chars=4, tool_response_truncate_side=side
    )
    assert limits.truncate_tool_text("abcdefghij", ByteRenderer()) == expected
    assert limits.truncate_tool_text("abcd", ByteRenderer()) == "abcd"


@settings(deadline=None)
@given(
    st.text(st.characters(codec="utf-8")),
    st.integers(1, 20),
    st.sampled_from(TruncateSide),
)
def test_at_most_the_limit_is_kept_besides_the_marker(
    text: str, keep: int, side: TruncateSide
) -> None:
    limits = LoopLimits(
        max_response_tokens=1, max_tool_response_chars=keep, tool_response_truncate_side=side
    )
    cut = limits.truncate_tool_text(text, ByteRenderer())
    assert cut == text if len(text) <= keep else len(cut) <= keep + len("...(truncated)...")


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "(truncated)...ghij"),
        ("right", "abcd...(truncated)"),
        ("middle", "ab...(truncated)...ij"),
    ],
)
def test_tokens_are_cut_as_characters_are(side: TruncateSide, expected: str) -> None:
    limits = LoopLimits(
        max_response_tokens=1,
        max_tool_response_chars=None,
        max_tool_response_tokens=4,
        tool_response_truncate_side=side,
    )
    assert limits.truncate_tool_text("abcdefghij", ByteRenderer()) == expected
    assert limits.truncate_tool_text("abcd", ByteRenderer()) == "abcd"


def test_characters_are_cut_first_and_there_is_one_marker() -> None:
    limits = LoopLimits(
        max_response_tokens=1, max_tool_response_chars=6, max_tool_response_tokens=4
    )
    assert limits.truncate_tool_text("abcdefghij", ByteRenderer()) == "ab...(truncated)...ij"
    assert limits.truncate_tool_text("abcdef", ByteRenderer()) == "ab...(truncated)...ef"


def test_what_the_characters_left_apart_is_not_joined_by_the_tokens() -> None:
    """The head has three times the tokens of the tail: their middle is not where the cut is."""
    limits = LoopLimits(
        max_response_tokens=1, max_tool_response_chars=8, max_tool_response_tokens=14
    )
    text = "\N{SNOWMAN}" * 4 + "x" * 10 + "abcd"
    assert limits.truncate_tool_text(text, ByteRenderer()) == (
        "\N{SNOWMAN}\N{SNOWMAN}...(truncated)...abcd"
    )


def test_a_character_that_the_cut_goes_through_is_dropped() -> None:
    """Each of these has three bytes, which are this renderer's tokens."""
    limits = LoopLimits(
        max_response_tokens=1, max_tool_response_chars=None, max_tool_response_tokens=8
    )
    assert limits.truncate_tool_text("\N{SNOWMAN}" * 9, ByteRenderer()) == (
        "\N{SNOWMAN}...(truncated)...\N{SNOWMAN}"
    )


@settings(deadline=None)
@given(
    st.text(st.characters(codec="utf-8")),
    st.integers(1, 20),
    st.sampled_from(TruncateSide),
)
def test_at_most_the_tokens_are_kept_besides_the_marker(
    text: str, keep: int, side: TruncateSide
) -> None:
    codec = ByteRenderer()
    limits = LoopLimits(
        max_response_tokens=1,
        max_tool_response_chars=None,
        max_tool_response_tokens=keep,
        tool_response_truncate_side=side,
    )
    cut = limits.truncate_tool_text(text, codec)
    fits = len(codec.encode(text)) <= keep
    assert cut == text if fits else len(codec.encode(cut)) <= keep + len("...(truncated)...")
