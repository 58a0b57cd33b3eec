"""Computes the value of an arithmetic expression with its own parser, never `eval`.

Invariant: `evaluate` does a bounded amount of work for any text. The text has at most `MAX_LENGTH`
characters and `MAX_DEPTH` open brackets, signs and powers, every intermediate value stays below
10**`MAX_DIGITS`, and a power is estimated before it is computed. All functions are pure.

The grammar, with Python's precedence and Python's meaning of `//` and `%`:

    sum     = product { ("+" | "-") product }
    product = sign { ("*" | "/" | "//" | "%") sign }
    sign    = ("+" | "-") sign | power
    power   = atom [ "**" sign ]                    so 2**3**2 is 512 and -2**2 is -4
    atom    = number | "(" sum ")"
    number  = digits ["." digits] [("e" | "E") ["+" | "-"] digits]

The typographic signs that language models write are taken for what they mean: U+2212 for "-",
U+00D7 and U+00B7 for "*", U+00F7 for "/". Integers stay exact; "/" always gives a float.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

MAX_LENGTH: Final = 256
MAX_DEPTH: Final = 32
MAX_DIGITS: Final = 308
"""About the range of a float, so that an integer can always be divided."""

_LIMIT: Final = 10**MAX_DIGITS
_TYPOGRAPHIC: Final = str.maketrans({"\u2212": "-", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/"})
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<symbol>\*\*|//|[-+*/%()]))"
)
_HINTS: Final = {
    "^": "; write ** for a power",
    ",": "; write numbers without thousands separators",
    "=": "; give only the expression, without its result",
    "$": "; give only numbers, without units",
}

Number = int | float


class ArithmeticRefusal(ValueError):
    """The text is not an expression, or its value is undefined or out of bounds."""


def evaluate(text: str) -> Number:
    """Computes `text`.

    Returns:
        An int where only integers and + - * // % ** (with a non-negative exponent) are used,
        otherwise a finite float.

    Raises:
        ArithmeticRefusal: `text` cannot be computed; the message gives the cause.
    """
    if len(text) > MAX_LENGTH:
        raise ArithmeticRefusal(
            f"the expression has {len(text)} characters; at most {MAX_LENGTH} are allowed"
        )
    return _Parser(text.translate(_TYPOGRAPHIC)).parse()


def format_number(value: Number) -> str:
    """Writes `value` as a person would: integers in full, floats to 12 significant digits.

    A float without a fraction is written as an integer (48/2 is "24") while it is exact, that is
    below 2**53.
    """
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return f"{value:.12g}"


class _Parser:
    """One pass over one text: the current token, its position, and the depth of nesting."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        self._end = 0
        self._advance()

    def parse(self) -> Number:
        value = self._sum()
        if self._symbol is not None or self._number is not None:
            self._unexpected()
        return value

    def _advance(self) -> None:
        """Reads the next token into `_number` or `_symbol`; at the end both are None."""
        self._number: Number | None = None
        self._symbol: str | None = None
        match = _TOKEN.match(self._text, self._end)
        if match is None:
            rest = self._text[self._end :]
            self._start = self._end + len(rest) - len(rest.lstrip())
            if rest.strip():
                self._unexpected()
            return
        self._start, self._end = match.start(match.lastgroup or 0), match.end()
        if (digits := match["number"]) is not None:
            self._number = self._checked(int(digits) if digits.isdecimal() else float(digits))
        self._symbol = match["symbol"]

    def _sum(self) -> Number:
        value = self._product()
        while (symbol := self._symbol) in ("+", "-"):
            self._advance()
            value = self._apply(symbol, value, self._product())
        return value

    def _product(self) -> Number:
        value = self._sign()
        while (symbol := self._symbol) in ("*", "/", "//", "%"):
            self._advance()
            value = self._apply(symbol, value, self._sign())
        return value

    def _sign(self) -> Number:
        if self._symbol not in ("+", "-"):
            return self._power()
        negate = self._symbol == "-"
        self._advance()
        value = self._nested(self._sign)
        return -value if negate else value

    def _power(self) -> Number:
        base = self._atom()
        if self._symbol != "**":
            return base
        self._advance()
        return self._apply("**", base, self._nested(self._sign))

    def _atom(self) -> Number:
        if self._number is not None:
            value = self._number
            self._advance()
            return value
        if self._symbol != "(":
            self._unexpected()
        self._advance()
        value = self._nested(self._sum)
        if self._symbol != ")":
            self._unexpected()
        self._advance()
        return value

    def _nested(self, rule: Callable[[], Number]) -> Number:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ArithmeticRefusal(f"the expression is nested more than {MAX_DEPTH} levels deep")
        value = rule()
        self._depth -= 1
        return value

    def _apply(self, symbol: str, left: Number, right: Number) -> Number:
        try:
            return self._checked(_OPERATIONS[symbol](left, right))
        except ZeroDivisionError:
            raise ArithmeticRefusal("division by zero") from None
        except OverflowError:
            raise _too_large() from None

    def _checked(self, value: Number) -> Number:
        if not -_LIMIT < value < _LIMIT:
            raise _too_large()
        return value

    def _unexpected(self) -> NoReturn:
        if self._start >= len(self._text):
            raise ArithmeticRefusal("the expression ends too early")
        character = self._text[self._start]
        hint = _HINTS.get(character, "")
        raise ArithmeticRefusal(f"unexpected {character!r} at position {self._start + 1}{hint}")


def _raise_to(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        # |base| >= 2**(bits-1), so this many bits are certain; computing them could take forever.
        if (abs(base).bit_length() - 1) * exponent > _LIMIT.bit_length():
            raise _too_large()
        return int(base**exponent)
    result = base**exponent
    if isinstance(result, complex):
        raise ArithmeticRefusal("a negative number has no real power with a fractional exponent")
    return float(result)


def _too_large() -> ArithmeticRefusal:
    return ArithmeticRefusal(f"a value has more than {MAX_DIGITS} digits")


_OPERATIONS: Final[Mapping[str, Callable[[Number, Number], Number]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": _raise_to,
}
