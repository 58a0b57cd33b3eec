import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.tools.arithmetic import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_LENGTH,
    ArithmeticRefusal,
    Number,
    evaluate,
    format_number,
)


@dataclass(frozen=True)
class Expression:
    """A text, and its value computed beside it by Python's own operators."""

    text: str
    compute: Callable[[], Number]


OPERATORS: dict[str, Callable[[Number, Number], Number]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def literal(value: Number) -> Expression:
    return Expression(repr(value), lambda: value)


def negated(inner: Expression) -> Expression:
    return Expression(f"-({inner.text})", lambda: -inner.compute())


def combined(left: Expression, symbol: str, right: Expression) -> Expression:
    text = f"({left.text}) {symbol} ({right.text})"
    return Expression(text, lambda: OPERATORS[symbol](left.compute(), right.compute()))


literals = st.one_of(
    st.integers(0, 10**6).map(literal),
    st.floats(0, 1e6, allow_subnormal=False).map(literal),
)
expressions = st.recursive(
    literals,
    lambda inner: st.one_of(
        inner.map(negated),
        st.builds(combined, inner, st.sampled_from(sorted(OPERATORS)), inner),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(expressions.filter(lambda expression: len(expression.text) <= MAX_LENGTH))
def test_it_agrees_with_python(expression: Expression) -> None:
    try:
        expected = expression.compute()
    except ZeroDivisionError:
        with pytest.raises(ArithmeticRefusal, match="division by zero"):
            evaluate(expression.text)
        return
    if not math.isfinite(expected) or abs(expected) >= 10**MAX_DIGITS:
        with pytest.raises(ArithmeticRefusal):
            evaluate(expression.text)
        return
    value = evaluate(expression.text)
    assert value == expected
    assert type(value) is type(expected)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 99), min_size=2, max_size=12),
    st.lists(st.sampled_from(["+", "-", "*"]), min_size=11, max_size=11),
)
def test_precedence_without_brackets(numbers: list[int], symbols: list[str]) -> None:
    text = str(numbers[0])
    total, product, sign = 0, numbers[0], 1
    for symbol, number in zip(symbols, numbers[1:], strict=False):
        text += f" {symbol} {number}"
        if symbol == "*":
            product *= number
        else:
            total += sign * product
            product, sign = number, 1 if symbol == "+" else -1
    assert evaluate(text) == total + sign * product


@settings(deadline=None)
@given(st.text(alphabet="0123456789.eE+-*/%() ,=x^", max_size=40) | st.text())
def test_any_text_has_a_finite_value_or_is_refused(text: str) -> None:
    try:
        value = evaluate(text)
    except ArithmeticRefusal:
        return
    assert math.isfinite(value)
    assert format_number(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2**3**2", 512),
        ("-2**2", -4),
        ("(-2)**2", 4),
        ("2**-1", 0.5),
        ("2**0.5", 2**0.5),
        ("0**0", 1),
        ("1**99999999999999999999", 1),
        ("(-1)**99999999999999999999", -1),
        ("-7//2", -4),
        ("-7%3", 2),
        ("7.5%2", 1.5),
        ("8/4/2", 1.0),
        ("--5", 5),
        ("+5", 5),
        ("2*-3", -6),
        (".5+5.", 5.5),
        ("1e3", 1000.0),
        ("2.5E-1", 0.25),
        (" ( 1 + 2 )\n* 3 ", 9),
        ("007", 7),
        ("7\u00d78\u22126\u00f72\u00b71", 53.0),
    ],
)
def test_values(text: str, value: Number) -> None:
    assert evaluate(text) == value
    assert type(evaluate(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "ends too early"),
        ("   ", "ends too early"),
        ("1+", "ends too early"),
        ("(1+2", "ends too early"),
        ("1 2", "unexpected '2' at position 3"),
        ("1)", r"unexpected '\)' at position 2"),
        ("*1", r"unexpected '\*' at position 1"),
        ("2 + x", "unexpected 'x' at position 5"),
        ("1_000", "unexpected '_'"),
        ("0x10", "unexpected 'x'"),
        ("1j", "unexpected 'j'"),
        ("\u0661", "unexpected"),
        ("2^3", r"write \*\* for a power"),
        ("1,234", "without thousands separators"),
        ("1+1=2", "without its result"),
        ("$5", "without units"),
        ("__import__('os')", "unexpected '_'"),
        ("1/0", "division by zero"),
        ("1//0", "division by zero"),
        ("1%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("0.0**-1", "division by zero"),
        ("(-8)**(1/3)", "no real power"),
        ("9**9**9", "more than 308 digits"),
        ("2**99999999999", "more than 308 digits"),
        ("9.5**99999", "more than 308 digits"),
        ("10**307*10", "more than 308 digits"),
        ("1e400", "more than 308 digits"),
        ("9" * 120 + "*" + "9" * 120 + "**2", "more than 308 digits"),
        ("1" * (MAX_LENGTH + 1), "257 characters; at most 256"),
        ("(" * (MAX_DEPTH + 1) + "1", "nested more than 32 levels"),
        ("-" * (MAX_DEPTH + 1) + "1", "nested more than 32 levels"),
        ("2**" * (MAX_DEPTH + 1) + "1", "nested more than 32 levels"),
    ],
)
def test_refusals_say_why(text: str, why: str) -> None:
    with pytest.raises(ArithmeticRefusal, match=why):
        evaluate(text)


def test_the_limits_themselves_are_allowed() -> None:
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1
    assert evaluate("9" * MAX_LENGTH) == int("9" * MAX_LENGTH)
    assert evaluate("10**307*9") == 9 * 10**307


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12, "12"),
        (10**20, "1" + "0" * 20),
        (24.0, "24"),
        (-0.5, "-0.5"),
        (0.1 + 0.2, "0.3"),
        (1 / 3, "0.333333333333"),
        (2.0**53, "9.00719925474e+15"),
        (1e300, "1e+300"),
        (1e-7, "1e-07"),
        (-0.0, "0"),
    ],
)
def test_numbers_are_written_as_a_person_would(value: Number, text: str) -> None:
    assert format_number(value) == text
