"""Tests of the limits."""

from dataclasses import replace

import pytest

from treadle.agent_loop import LoopLimits, TruncateSide


@pytest.mark.parametrize("name", ["max_response_tokens", "max_parallel_calls", "max_user_turns"])
def test_bounds_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        replace(LoopLimits(max_response_tokens=1), **{name: 0})  # type: ignore[arg-type]


def test_a_side_is_accepted_by_its_name() -> None:
    side = "left"
    limits = LoopLimits(max_response_tokens=1, tool_response_truncate_side=side)  # type: ignore[arg-type]
    assert limits.tool_response_truncate_side is TruncateSide.LEFT
