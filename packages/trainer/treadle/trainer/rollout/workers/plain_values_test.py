"""Plain values as JSON: what is read is what was written; nothing else can be written."""

import enum
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from treadle.trainer.rollout.workers.plain_values import (
    NotPlainError,
    from_plain_json,
    from_wire,
    plain_json,
    to_wire,
)
from treadle.trainer.rollout.workers.testing import PLAIN, TEXTS, shown


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_what_is_read_is_what_was_written_with_its_types(value: Any) -> None:
    text = plain_json(value, "value")
    json.loads(from_wire(text))  # it is JSON
    assert shown(from_plain_json(text)) == shown(value)


@given(TEXTS)
def test_text_is_what_it_was(text: str) -> None:
    assert from_wire(to_wire(text)) == text


class Color(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "arrives"),
    [(np.float64(0.1), 0.1), (Color.RED, "red"), ([Level.HIGH], [3]), ({Color.RED: 1}, {"red": 1})],
)
def test_a_value_of_a_subclass_arrives_as_one_of_the_class(value: object, arrives: object) -> None:
    assert repr(from_plain_json(plain_json(value, "value"))) == repr(arrives)


@dataclass
class Place:
    x: int


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        ({"a": [0, {"b": Place(1)}]}, "['a'][1]['b']", f"{__name__}.Place"),
        ({("k",): np.float32(1)}, "[('k',)]", "numpy.float32"),
        (np.zeros(2), "", "numpy.ndarray"),
        ([lambda: 0], "[0]", "builtins.function"),
        (Fraction(1, 2), "", "fractions.Fraction"),
        ((1, Place), "[1]", "builtins.type"),
    ],
)
def test_another_value_is_refused_with_its_place_its_type_and_the_fix(
    value: object, place: str, kind: str
) -> None:
    expected = f"fields{place} is of type {kind}; return plain data: "
    with pytest.raises(NotPlainError, match=f"^{re.escape(expected)}"):
        plain_json(value, "fields")


def test_what_json_cannot_hold_is_refused() -> None:
    within: list[object] = []
    within.append(within)
    with pytest.raises(RecursionError):
        plain_json(within, "fields")
    with pytest.raises(ValueError, match="4300 digits"):
        plain_json(10**5000, "fields")
    assert from_plain_json(plain_json(10**4000, "fields")) == 10**4000


@pytest.mark.parametrize(
    "text", [b'{"!": ["eval", "1"]}', b'{"!": 1}', b'{"!": ["bytes", 3]}', b"{"]
)
def test_what_nobody_writes_is_an_error_and_runs_nothing(text: bytes) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        from_plain_json(text)


def test_a_decimal_keeps_its_digits() -> None:
    assert str(from_plain_json(plain_json(Decimal("1.10"), "value"))) == "1.10"
