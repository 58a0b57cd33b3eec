r"""Conditions on trajectories, as people write them: `reward<0.5 tool~python text~"no such file"`.

    filter   = [condition {whitespace condition}]        all of them must hold
    condition = column operator value
    operator  = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~" | "!~"
    value     = characters without whitespace or quotes, or "..." with \" and \\; may be empty

`~` holds if the column contains the value, in any case; `=` on a list holds if an element equals
it. An empty value stands for a missing one: `error=` holds where there is no error, `error!=` where
there is one. `!=` and `!~` hold exactly where `=` and `~` do not, also where the value is missing.

Invariant: a value reaches SQL only as a parameter, and every other part of the SQL is text of this
module, so that no filter can be more than a filter.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

__all__ = ["FILTER_COLUMNS", "Condition", "Filter", "FilterColumn", "FilterError"]

Operator = Literal["=", "!=", "<", "<=", ">", ">=", "~", "!~"]


class FilterError(ValueError):
    """A filter is wrong; the message names the condition, the cause and the fix."""


class FilterColumn(NamedTuple):
    """A name that a condition may begin with.

    Attributes:
        sql: Expression for it; for a list, its elements as a list of strings.
    """

    sql: str
    kind: Literal["number", "string", "list"]


_NUMBERS = (
    *("step", "rollout_index", "reward", "advantage", "num_turns", "num_tokens"),
    *("num_sampled_tokens", "duration_s", "drift"),
)
_STRINGS = (
    *("phase", "task_id", "loop", "data_source", "ground_truth", "answer", "stop", "error"),
    *("prompt", "response"),
)

FILTER_COLUMNS: Final = MappingProxyType(
    {
        **{name: FilterColumn(name, "number") for name in _NUMBERS},
        **{name: FilterColumn(name, "string") for name in _STRINGS},
        "tool": FilterColumn("tools", "list"),
        "finding": FilterColumn("[f.kind for f in findings]", "list"),
        "text": FilterColumn("concat_ws(chr(10), messages, error)", "string"),
    }
)
"""The columns of conditions: `tool` is any tool that was called, `finding` the kind of any
finding, `text` all messages and the error."""

_OPERATORS: Final = MappingProxyType(
    {
        "number": ("=", "!=", "<", "<=", ">", ">="),
        "string": ("=", "!=", "~", "!~"),
        "list": ("=", "!=", "~", "!~"),
    }
)
_CONDITION = re.compile(
    r'(?P<column>[^\s=!<>~"]*)(?P<operator>!=|<=|>=|!~|[=<>~])'
    r'(?:"(?P<quoted>(?:[^"\\]|\\["\\])*)"|(?P<bare>[^\s"]*))(?=\s|$)'
)
_ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition.

    Attributes:
        operator: One that the column's kind supports.
        value: Value to compare with; None means a missing one.

    Raises:
        FilterError: There is no such column, or its kind does not support the comparison.
    """

    column: str
    operator: Operator
    value: str | float | None

    def __post_init__(self) -> None:
        """Checks the column, its operators and its values."""
        kind = _known(self.column).kind
        if self.operator not in _OPERATORS[kind]:
            known = " ".join(_OPERATORS[kind])
            raise FilterError(
                f"{self.column}{self.operator}: {self.column} is a {kind}; compare it with {known}"
            )
        if self.value is None and self.operator not in ("=", "!="):
            raise FilterError(
                f"{self.column}{self.operator}: the value is missing; only = and != may have none"
            )
        if self.value is not None and isinstance(self.value, str) is (kind == "number"):
            raise FilterError(f"{self}: {self.column} is a {kind}, and {self.value!r} is none")

    def sql(self) -> tuple[str, list[str | float]]:
        """Returns an expression that is true or false, never null, and its parameters."""
        column = FILTER_COLUMNS[self.column]
        positive = "=" if self.operator == "!=" else self.operator.removeprefix("!")
        negated = self.operator.startswith("!")
        expression = _holds(column, positive, missing=self.value is None)
        return f"({'NOT ' if negated else ''}coalesce({expression}, false))", (
            [] if self.value is None else [self.value]
        )

    def __str__(self) -> str:
        """Returns it as `Filter.parse` reads it."""
        if self.value is None:
            text = ""
        elif isinstance(self.value, float):
            text = repr(self.value).removesuffix(".0")
        elif self.value and not re.search(r'[\s"]', self.value):
            text = self.value
        else:
            text = '"' + self.value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return f"{self.column}{self.operator}{text}"


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions that must all hold; without any, every trajectory passes."""

    conditions: tuple[Condition, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Parses a filter; see the module for its grammar.

        Raises:
            FilterError: The text is no filter.
        """
        conditions: list[Condition] = []
        place = len(text) - len(text.lstrip())
        while place < len(text):
            match = _CONDITION.match(text, place)
            if match is None:
                raise _no_condition(text[place:])
            conditions.append(_condition(match))
            rest = text[match.end() :]
            place = len(text) - len(rest.lstrip())
        return cls(tuple(conditions))

    def __and__(self, other: Filter) -> Filter:
        """Returns the filter that both must pass."""
        return Filter((*self.conditions, *other.conditions))

    def sql(self) -> tuple[str, list[str | float]]:
        """Returns an expression for WHERE, and its parameters in the order of their `?`."""
        parts = [condition.sql() for condition in self.conditions]
        where = " AND ".join(expression for expression, _ in parts) or "true"
        return where, [value for _, values in parts for value in values]

    def __str__(self) -> str:
        """Returns it as `parse` reads it."""
        return " ".join(map(str, self.conditions))


def _holds(column: FilterColumn, operator: str, *, missing: bool) -> str:
    """Returns the expression of an operator without negation; null where there is no value."""
    if column.kind == "list":
        if missing:
            return f"len({column.sql}) = 0"
        if operator == "=":
            return f"list_contains({column.sql}, ?)"
        return f"contains(lower(array_to_string({column.sql}, chr(10))), lower(?))"
    if missing:
        return f"{column.sql} IS NULL"
    if operator == "~":
        return f"contains(lower({column.sql}), lower(?))"
    return f"{column.sql} {operator} ?"


def _condition(match: re.Match[str]) -> Condition:
    name, operator = match["column"], match["operator"]
    kind = _known(name).kind
    value: str | float | None
    if match["quoted"] is not None:
        value = _ESCAPED.sub(r"\1", match["quoted"])
    else:
        value = match["bare"] or None
    if kind == "number" and value is not None:
        value = _number(match[0], value)
    return Condition(name, operator, value)  # type: ignore[arg-type]  # the pattern has no other


def _number(condition: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FilterError(f"{condition}: {text!r} is not a finite number")
    return value


def _known(name: str) -> FilterColumn:
    if name in FILTER_COLUMNS:
        return FILTER_COLUMNS[name]
    near = difflib.get_close_matches(name, FILTER_COLUMNS, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    known = ", ".join(FILTER_COLUMNS)
    raise FilterError(f"there is no column {name!r} to filter by; {meant}known are {known}")


def _no_condition(rest: str) -> FilterError:
    word = rest.split(maxsplit=1)[0]
    if '"' in word:
        cause = 'a quoted value ends with ", and \\" and \\\\ stand for " and \\ in it'
    else:
        cause = "write a column, one of = != < <= > >= ~ !~, and a value"
    return FilterError(f'{word!r} is not a condition: {cause}, as reward<0.5 or text~"not found"')
