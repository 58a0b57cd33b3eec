"""Ids of calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop.capture.call_ids import CallIds


@pytest.mark.parametrize(
    ("wanted", "given_out"),
    [
        (["call_0", "call_1", "call_0"], ["call_0", "call_1", "call_2"]),
        (["functions.add:0", "functions.add:0"], ["functions.add:0", "functions.add:1"]),
        (["abc000009", "abc000009"], ["abc000009", "abc000010"]),
        (["x", "x", "x"], ["x", "x1", "x2"]),
        (["", ""], ["", "1"]),
    ],
)
def test_an_id_that_is_taken_is_counted_up(wanted: list[str], given_out: list[str]) -> None:
    ids = CallIds()
    assert [ids.take(each) for each in wanted] == given_out


@given(st.lists(st.text("a019", max_size=12), max_size=20))
def test_no_id_is_given_twice(wanted: list[str]) -> None:
    ids = CallIds()
    given_out = [ids.take(each) for each in wanted]
    assert len(set(given_out)) == len(given_out)
