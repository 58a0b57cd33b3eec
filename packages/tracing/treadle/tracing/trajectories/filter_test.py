"""Filters say what they mean, to people and to DuckDB."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.tracing.trajectories.filter import FILTER_COLUMNS, Condition, Filter, FilterError


def test_a_filter_is_conditions_that_all_hold() -> None:
    parsed = Filter.parse(
        '  reward<0.5 tool~python phase=val\tstep>=3 error!= text~"a \\"b\\" \\\\"'
    )
    assert parsed.conditions == (
        Condition("reward", "<", 0.5),
        Condition("tool", "~", "python"),
        Condition("phase", "=", "val"),
        Condition("step", ">=", 3.0),
        Condition("error", "!=", None),
        Condition("text", "~", 'a "b" \\'),
    )
    assert Filter.parse("") & Filter.parse(" \n") == Filter()
    assert Filter.parse("step=1") & Filter.parse("drift>0") == Filter.parse("step=1 drift>0")


def test_values_are_parameters() -> None:
    where, values = Filter.parse("stop=x'; text!~OR task_id=").sql()
    assert "x'" not in where
    assert values == ["x';", "OR"]
    assert where.count("?") == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "rewards<1",
            r"there is no column 'rewards' to filter by; did you mean reward\? known",
        ),
        ("colour=1", "there is no column 'colour' to filter by; known are step, "),
        ("=1", "there is no column ''"),
        ("reward~1", "reward~: reward is a number; compare it with = != < <= > >="),
        ("stop<3", "stop<: stop is a string; compare it with = != ~ !~"),
        ("reward<", "reward<: the value is missing; only = and != may have none"),
        ("reward<high", "reward<high: 'high' is not a finite number"),
        ("step=nan", "step=nan: 'nan' is not a finite number"),
        ("failed", "'failed' is not a condition: write a column, one of = != <"),
        ("step=1 and", "'and' is not a condition"),
        ('text~"open', "'text~\"open' is not a condition: a quoted value ends with"),
        ('text~"a\\b"', "is not a condition: a quoted value ends with"),
        ('text~a"b', "is not a condition: a quoted value ends with"),
    ],
)
def test_an_error_names_the_condition_and_the_fix(text: str, says: str) -> None:
    with pytest.raises(FilterError, match=says):
        Filter.parse(text)


_NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def _conditions(draw: st.DrawFn) -> Condition:
    name = draw(st.sampled_from(sorted(FILTER_COLUMNS)))
    operator = draw(st.sampled_from(["=", "!="]))
    value: str | float | None
    if FILTER_COLUMNS[name].kind == "number":
        operator = draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">="]))
        value = draw(_NUMBERS)
    else:
        operator = draw(st.sampled_from(["=", "!=", "~", "!~"]))
        value = draw(st.text())
    missing = operator in ("=", "!=") and draw(st.booleans())
    return Condition(name, operator, None if missing else value)  # type: ignore[arg-type]


@settings(max_examples=50)
@given(st.lists(_conditions(), max_size=4))
def test_what_is_written_is_read_again(conditions: list[Condition]) -> None:
    made = Filter(tuple(conditions))
    assert Filter.parse(str(made)) == made


@given(st.text(alphabet=st.sampled_from('reward stop=!<>~"\\01.e')))
def test_any_text_is_a_filter_or_an_error(text: str) -> None:
    try:
        parsed = Filter.parse(text)
    except FilterError:
        return
    where, values = parsed.sql()
    assert where.count("?") == len(values)
    assert all(not isinstance(value, float) or math.isfinite(value) for value in values)
