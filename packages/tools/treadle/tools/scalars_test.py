import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.tools.scalars import ScalarError, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("NULL", None),
        ("True", True),
        ("false", False),
        ("7", 7),
        ("-7", -7),
        ("1_000", 1000),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("2.", 2.0),
        ("error", "error"),
        ("'error'", "error"),
        ('"a, b"', "a, b"),
        (r"'it\'s'", "it's"),
        ("", ""),
        ("''", ""),
        ("2026-01-01", "2026-01-01"),
        ("no", "no"),
        ("/home/a b/c.jsonl", "/home/a b/c.jsonl"),
        ("a=b", "a=b"),
        ("['console','wandb']", ["console", "wandb"]),
        ("[1, 2.5, x y, null]", [1, 2.5, "x y", None]),
        ("[]", []),
        ("[1,]", [1]),
        ("[[1],[2]]", [[1], [2]]),
        ("host:port", "host:port"),
    ],
)
def test_values_are_read_in_hydras_forms(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize("text", ["[1", "'a", "[1] 2", "[,]", "[a b c", "['a' b]"])
def test_what_is_not_closed_is_refused(text: str) -> None:
    with pytest.raises(ScalarError):
        parse_value(text)


@given(st.lists(st.integers() | st.booleans() | st.none(), max_size=5))
def test_lists_of_plain_values_survive(values: list[object]) -> None:
    text = "[" + ",".join("null" if v is None else str(v) for v in values) + "]"
    assert parse_value(text) == values


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive(value: float) -> None:
    parsed = parse_value(repr(value))
    assert isinstance(parsed, float)
    assert math.isclose(parsed, value, rel_tol=0, abs_tol=0)


@given(st.text(max_size=30))
def test_any_text_gives_a_value_or_a_scalar_error(text: str) -> None:
    with contextlib.suppress(ScalarError):
        parse_value(text)


@given(st.text(max_size=30).filter(lambda text: "\\" not in text and "'" not in text))
def test_quoting_keeps_a_text_as_it_is(text: str) -> None:
    assert parse_value(f"'{text}'") == text
