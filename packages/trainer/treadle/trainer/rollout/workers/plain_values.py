"""Plain values as JSON: what a user puts into a row, a tool call or a metric, for another process.

Plain are text, numbers, booleans, None, lists and dictionaries, which are JSON; and tuples, sets,
bytes, dates, times and decimals, which are `{"!": [name, JSON]}`. A value of a subclass, as
numpy's `float64`, arrives as one of the class.

Invariants:

1. What is read equals what was written, with the same types, NaN and half a surrogate pair
   included.
2. Reading runs no code of whoever wrote, and makes objects of these types only.
3. Another value is refused with its place, its type and the fix.
"""

import base64
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

__all__ = ["NotPlainError", "check_text", "from_plain_json", "from_wire", "plain_json", "to_wire"]

_AS_THEY_ARE: Final = frozenset({str, int, float, bool, type(None)})
_TAG: Final = "!"
_ENCODE: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_OTHERS: Final[tuple[tuple[type, Callable[[Any], object], Callable[[Any], object]], ...]] = (
    (tuple, list, tuple),
    (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    # A datetime is a date, so it comes first.
    (datetime, datetime.isoformat, datetime.fromisoformat),
    (date, date.isoformat, date.fromisoformat),
    (time, time.isoformat, time.fromisoformat),
    (timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda v: timedelta(*v)),
    (Decimal, str, Decimal),
    (set, list, set),
    (frozenset, list, frozenset),
)
"""The class, what turns a value of it into others, and these into a value."""
_MAKE: Final = {kind.__name__: make for kind, _, make in _OTHERS} | {"dict": dict}


class NotPlainError(TypeError):
    """A value is not plain; the message has its place, its type and the fix."""

    def __init__(self, value: object, what: str) -> None:
        super().__init__(value, what)
        self._value = value
        self._place: list[object] = []
        self._what = what

    def within(self, key: object) -> "NotPlainError":
        """Returns the error of what has the value under a key."""
        self._place.insert(0, key)
        return self

    def of(self, owner: str) -> "NotPlainError":
        """Returns the error of what has the value as an attribute."""
        self._what = f"{owner}.{self._what}"
        return self

    def __str__(self) -> str:
        kind = type(self._value)
        place = "".join(f"[{key!r}]" for key in self._place)
        return (
            f"{self._what}{place} is of type {kind.__module__}.{kind.__qualname__}; return plain "
            "data: text, numbers, lists, dictionaries"
        )


def plain_json(value: object, what: str) -> bytes:
    """Returns the JSON of a value.

    Args:
        what: The value's name in an error.

    Raises:
        NotPlainError: It is not plain, or it has what is not.
        ValueError: It has a number of more than 4,300 digits.
        RecursionError: It is nested too deeply, or has itself.
    """
    return to_wire(_ENCODE(_tagged(value, what)))


def from_plain_json(text: bytes) -> Any:
    """Returns the value that `plain_json` wrote.

    Raises:
        ValueError, TypeError, LookupError, RecursionError, ArithmeticError: It wrote another text.
    """
    return json.loads(from_wire(text), object_hook=_untagged if b'"!"' in text else None)


def to_wire(text: str) -> bytes:
    """Returns text as UTF-8, in which half a surrogate pair has three bytes."""
    return text.encode("utf-8", "surrogatepass")


def from_wire(text: bytes) -> str:
    """Returns the text of which `to_wire` returned the bytes."""
    return text.decode("utf-8", "surrogatepass")


def check_text(value: str, what: str) -> bytes:
    """Returns text that a user's code gave, for the wire.

    Raises:
        NotPlainError: It is no text.
    """
    if not isinstance(value, str):
        raise NotPlainError(value, what)
    return to_wire(value)


def _tagged(value: Any, what: str) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is not dict and isinstance(value, dict):
        value, kind = dict(value), dict
    if kind is dict:
        if all(type(key) is str and key != _TAG for key in value):
            return {key: _inside(item, what, key) for key, item in value.items()}
        pairs = value.items()
        return {_TAG: ["dict", [[_tagged(k, what), _inside(v, what, k)] for k, v in pairs]]}
    if isinstance(value, list):
        if _AS_THEY_ARE.issuperset(map(type, value)):
            return value
        return [_inside(item, what, number) for number, item in enumerate(value)]
    if isinstance(value, str | int | float):
        return value  # of a subclass: JSON has what it is as text or number
    for other, plainer, _ in _OTHERS:
        if isinstance(value, other):
            return {_TAG: [other.__name__, _tagged(plainer(value), what)]}
    raise NotPlainError(value, what)


def _inside(value: Any, what: str, key: object) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    try:
        return _tagged(value, what)
    except NotPlainError as error:
        raise error.within(key) from None


def _untagged(found: dict[str, Any]) -> Any:
    if _TAG not in found:
        return found
    name, value = found[_TAG]
    return _MAKE[name](value)
