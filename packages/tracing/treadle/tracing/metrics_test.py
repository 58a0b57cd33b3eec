import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.tracing import Metric, Reduce, aggregate

values = st.lists(st.lists(st.floats(-1e6, 1e6)), min_size=1)


def reported(trajectories: list[list[float]], reduce: Reduce) -> list[list[Metric]]:
    return [[Metric("x", value, reduce) for value in metrics] for metrics in trajectories]


@settings(deadline=None)
@given(values)
def test_each_rule_agrees_with_its_definition(trajectories: list[list[float]]) -> None:
    flat = [value for metrics in trajectories for value in metrics]
    for reduce, expected in (
        (Reduce.MEAN, math.fsum(flat) / len(flat) if flat else None),
        (Reduce.SUM, math.fsum(flat) if flat else None),
        (Reduce.MAX, max(flat, default=None)),
        (Reduce.LAST, flat[-1] if flat else None),
    ):
        combined = aggregate(reported(trajectories, reduce))
        assert combined == ({} if expected is None else {"x": pytest.approx(expected, abs=1e-6)})


def test_names_keep_the_order_in_which_they_were_first_seen() -> None:
    combined = aggregate([[Metric("b", 1.0)], [Metric("a", 2.0), Metric("b", 3.0)]])
    assert list(combined.items()) == [("b", 2.0), ("a", 2.0)]


def test_a_metric_averages_unless_it_says_otherwise() -> None:
    assert Metric("x", 1.0).reduce is Reduce.MEAN


def test_one_name_under_two_rules_is_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match=r"'x' is reported as SUM and as MEAN"):
        aggregate([[Metric("x", 1.0)], [Metric("x", 1.0, Reduce.SUM)]])
