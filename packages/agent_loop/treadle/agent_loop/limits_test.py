"""Tests of the limits and of the truncation of tool texts."""

from dataclasses import replace

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
@given(st.text(), st.integers(1, 20), st.sampled_from(TruncateSide))
def test_at_most_the_limit_is_kept_besides_the_marker(
    text: str, keep: int, side: TruncateSide
) -> None:
    limits = LoopLimits(
        max_response_tokens=1, max_tool_response_chars=keep, tool_response_truncate_side=side
    )
    cut = limits.truncate_tool_text(text, ByteRenderer())
    assert cut == text if len(text) <= keep else len(cut) <= keep + len("...(truncated)...")


@pytest.mark.parametrize("name", ["max_response_tokens", "max_parallel_calls", "max_user_turns"])
def test_bounds_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        replace(LoopLimits(max_response_tokens=1), **{name: 0})  # type: ignore[arg-type]


def test_a_side_is_accepted_by_its_name() -> None:
    side = "left"
    limits = LoopLimits(max_response_tokens=1, tool_response_truncate_side=side)  # type: ignore[arg-type]
    assert limits.tool_response_truncate_side is TruncateSide.LEFT
