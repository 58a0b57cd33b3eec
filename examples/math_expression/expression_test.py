import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from math_expression.expression import (
    Binary,
    Expression,
    evaluate,
    identity,
    is_held_out,
    parse,
    sample,
    steps,
)
from treadle.trainer.demo.math_expression.tool import OPERATORS

_expressions = st.recursive(
    st.integers(0, 99),
    lambda inner: st.builds(Binary, st.sampled_from(list(OPERATORS)), inner, inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3@2", 5),
        ("3@2+4", 9),
        ("3*(4@2)", 24),
        ("(5@3)*2", 18),
        ("8-3-2", 3),
        ("8 @ 3 @ 2", 50),
        ("2+3@4", 3),
        ("2*3@4", 10),
        ("((7))", 7),
        ("1@9", -15),
    ],
)
def test_values(text: str, value: int) -> None:
    assert evaluate(parse(text)) == value


@given(_expressions)
def test_what_is_written_is_read_back(expression: Expression) -> None:
    assert parse(str(expression)) == expression
    assert parse(str(expression).replace(" ", "")) == expression


@given(_expressions)
def test_without_at_the_value_is_pythons(expression: Expression) -> None:
    text = str(expression)
    if "@" not in text:
        assert evaluate(expression) == eval(text)


@given(_expressions)
def test_the_steps_lead_to_the_value(expression: Expression) -> None:
    plan = steps(expression)
    assert len(plan) == sum(str(expression).count(symbol) for symbol in OPERATORS)
    assert all(OPERATORS[step.symbol](step.a, step.b) == step.value for step in plan)
    if plan:
        assert plan[-1].value == evaluate(expression)


def test_steps_go_from_left_to_right() -> None:
    assert [str(step) for step in steps(parse("3 @ 2 + 4"))] == ["3 @ 2 = 5", "5 + 4 = 9"]
    assert [str(step) for step in steps(parse("3 * (4 @ 2)"))] == ["4 @ 2 = 8", "3 * 8 = 24"]
    assert [str(step) for step in steps(parse("1 * 2 - 3 * 4"))] == [
        "1 * 2 = 2",
        "3 * 4 = 12",
        "2 - 12 = -10",
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "at its end"),
        ("3 @", "at its end"),
        ("(1 + 2", "at its end"),
        ("1 + 2)", "at character 5"),
        ("1 / 2", "at character 2"),
        ("1 2", "at character 2"),
        ("-1", "at character 0"),
        ("1 @ x", "at character 4"),
    ],
)
def test_what_is_no_expression_is_refused(text: str, where: str) -> None:
    with pytest.raises(ValueError, match=f"something else stands {where}"):
        parse(text)


@given(st.integers(), st.integers(0, 6))
def test_a_drawn_expression_keeps_to_its_ranges(seed: int, num_operators: int) -> None:
    expression = sample(random.Random(seed), num_operators=num_operators, operands=(3, 7))
    assert len(steps(expression)) == num_operators
    assert set(str(expression)) <= set("34567 +-*@()")


def test_all_trees_are_drawn() -> None:
    rng = random.Random(0)
    drawn = {str(sample(rng, num_operators=2, operands=(1, 1))) for _ in range(2000)}
    written = {f"1 {a} 1 {b} 1" for a in OPERATORS for b in OPERATORS}
    assert drawn >= written
    assert all(text in written or "(" in text for text in drawn)
    assert any(text.startswith("(") for text in drawn)
    assert any(text.endswith(")") for text in drawn)


def test_swapped_sides_are_the_same_expression_where_they_may_be() -> None:
    assert identity(parse("1 + 2 * 3")) == identity(parse("3 * 2 + 1"))
    assert identity(parse("1 - 2")) != identity(parse("2 - 1"))
    assert identity(parse("1 @ 2")) != identity(parse("2 @ 1"))


@given(_expressions, _expressions)
def test_swapping_does_not_change_the_split(left: Expression, right: Expression) -> None:
    assert is_held_out(Binary("+", left, right)) is is_held_out(Binary("+", right, left))


def test_one_in_ten_is_held_out() -> None:
    rng = random.Random(0)
    drawn = [sample(rng, num_operators=2, operands=(1, 9)) for _ in range(5000)]
    assert 0.08 < sum(map(is_held_out, drawn)) / len(drawn) < 0.12
