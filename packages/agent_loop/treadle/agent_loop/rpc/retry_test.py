"""Tests of the waits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop.rpc import RetryPolicy


def test_waits_grow_to_their_bound() -> None:
    policy = RetryPolicy(initial_s=0.1, max_s=1.0, factor=2.0, jitter=0.0)
    waits = [policy.wait_s(n, retry_after_s=None) for n in range(1, 7)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


@settings(deadline=None)
@given(st.integers(1, 10_000), st.none() | st.floats(0, 100), st.floats(0, 1))
def test_waits_keep_to_what_the_server_asks(attempt: int, asked: float | None, draw: float) -> None:
    policy = RetryPolicy(jitter=0.25)
    wait = policy.wait_s(attempt, retry_after_s=asked, uniform=lambda: draw)
    least = max(asked or 0.0, policy.initial_s)
    assert least <= wait <= max(asked or 0.0, policy.max_s) * 1.25


@pytest.mark.parametrize("bad", [{"max_failures": 0}, {"initial_s": 0.0}, {"initial_s": 9.0}])
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RetryPolicy(**bad)  # type: ignore[arg-type]
