"""Expressions of whole numbers with ``+ - * @``, where ``a @ b`` is ``3a - 2b``.

``*`` and ``@`` bind tighter than ``+`` and ``-``; operators of one rank are taken from left to
right. Invariant: `parse` and `str` are inverses: ``parse(str(expression)) == expression``, and
`str` writes no bracket that the ranks do not need.

Everything is a pure function of its arguments and random generator.

Example:
    >>> expression = parse("3 * (4 @ 2)")
    >>> [str(step) for step in steps(expression)]
    ['4 @ 2 = 8', '3 * 8 = 24']
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from treadle.trainer.demo.math_expression.tool import OPERATORS

__all__ = [
    "Binary",
    "Expression",
    "Step",
    "evaluate",
    "identity",
    "is_held_out",
    "parse",
    "sample",
    "steps",
]


_RANK: Final[Mapping[str, int]] = MappingProxyType({"+": 1, "-": 1, "*": 2, "@": 2})
_COMMUTES: Final = frozenset("+*")
_TOKEN: Final = re.compile(r"\s*(?:(\d+)|(.))")


@dataclass(frozen=True, slots=True)
class Binary:
    """An operator with what stands on its sides."""

    symbol: str
    left: Expression
    right: Expression

    def __str__(self) -> str:
        rank = _RANK[self.symbol]
        left = _bracketed(self.left, below=rank)
        right = _bracketed(self.right, below=rank + 1)
        return f"{left} {self.symbol} {right}"


Expression: TypeAlias = int | Binary
"""A number from 0 on, or an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operator, applied."""

    a: int
    b: int
    symbol: str
    value: int

    def __str__(self) -> str:
        return f"{self.a} {self.symbol} {self.b} = {self.value}"


def _bracketed(expression: Expression, *, below: int) -> str:
    if isinstance(expression, Binary) and _RANK[expression.symbol] < below:
        return f"({expression})"
    return str(expression)


def steps(expression: Expression) -> tuple[Step, ...]:
    """Returns the operators in order of application: left side, right side, itself."""
    if isinstance(expression, int):
        return ()
    left, right = steps(expression.left), steps(expression.right)
    a = left[-1].value if left else evaluate(expression.left)
    b = right[-1].value if right else evaluate(expression.right)
    value = OPERATORS[expression.symbol](a, b)
    return (*left, *right, Step(a=a, b=b, symbol=expression.symbol, value=value))


def evaluate(expression: Expression) -> int:
    """Returns the value."""
    if isinstance(expression, int):
        return expression
    apply = OPERATORS[expression.symbol]
    return apply(evaluate(expression.left), evaluate(expression.right))


def parse(text: str) -> Expression:
    """Reads an expression.

    Raises:
        ValueError: The text is not an expression; the message says where it stops being one.
    """
    tokens = [(m.group(1) or m.group(2), m.start(m.lastindex or 0)) for m in _TOKEN.finditer(text)]
    expression, end = _parse_ranked(text, tokens, 0, rank=1)
    if end < len(tokens):
        raise _unreadable(text, tokens, end)
    return expression


def _parse_ranked(
    text: str, tokens: Sequence[tuple[str, int]], at: int, *, rank: int
) -> tuple[Expression, int]:
    """Reads operators of `rank` and above from token `at` on; returns the first token after."""
    if at >= len(tokens):
        raise _unreadable(text, tokens, at)
    token = tokens[at][0]
    expression: Expression
    if token == "(":
        expression, at = _parse_ranked(text, tokens, at + 1, rank=1)
        if at >= len(tokens) or tokens[at][0] != ")":
            raise _unreadable(text, tokens, at)
    elif token.isdecimal():
        expression = int(token)
    else:
        raise _unreadable(text, tokens, at)
    at += 1
    while at < len(tokens) and _RANK.get(tokens[at][0], 0) >= rank:
        symbol = tokens[at][0]
        right, at = _parse_ranked(text, tokens, at + 1, rank=_RANK[symbol] + 1)
        expression = Binary(symbol, expression, right)
    return expression, at


def _unreadable(text: str, tokens: Sequence[tuple[str, int]], at: int) -> ValueError:
    where = f"at character {tokens[at][1]}" if at < len(tokens) else "at its end"
    return ValueError(
        f"{text!r} is not an expression of whole numbers, {' '.join(OPERATORS)} and brackets: "
        f"something else stands {where}"
    )


def sample(rng: random.Random, *, num_operators: int, operands: tuple[int, int]) -> Expression:
    """Draws a tree by splitting its operators at random, and its leaves from a range.

    Args:
        rng: Where the randomness comes from.
        num_operators: At least 0.
        operands: Smallest and largest number, both included.
    """
    if num_operators == 0:
        return rng.randint(*operands)
    symbol = rng.choice(tuple(OPERATORS))
    num_left = rng.randrange(num_operators)
    left = sample(rng, num_operators=num_left, operands=operands)
    right = sample(rng, num_operators=num_operators - 1 - num_left, operands=operands)
    return Binary(symbol, left, right)


def identity(expression: Expression) -> str:
    """Returns one string for all expressions that differ only in the order of swappable sides."""
    if isinstance(expression, int):
        return str(expression)
    sides = [identity(expression.left), identity(expression.right)]
    if expression.symbol in _COMMUTES:
        sides.sort()
    return f"({sides[0]}{expression.symbol}{sides[1]})"


def is_held_out(expression: Expression) -> bool:
    """Returns whether an expression belongs to the validation split: one in ten, by its `identity`.

    The same in every process and for every size of a data set, so what a model was warm-started on
    can never be in a validation set made later.
    """
    digest = hashlib.blake2b(identity(expression).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % 10 == 0
