"""Rows of a query as a table for people, as JSON lines or as CSV.

Invariant: what a model wrote is inert in each of them. The table and CSV show control characters
and those that turn the direction of writing as escapes; JSON escapes all that is not ASCII.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["write_rows"]

_CELL_CHARACTERS = 60
_SHORT_CHARACTERS = 16
_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def write_rows(table: pa.Table, form: Literal["table", "json", "csv"], out: TextIO) -> None:
    """Writes the rows.

    Args:
        form: How. In a table, a cell has at most 60 characters.
    """
    rows = _plain(table)
    if form == "json":
        for row in rows:
            out.write(json.dumps(row, default=str) + "\n")
    elif form == "csv":
        writer = csv.writer(out)
        writer.writerow(table.column_names)
        writer.writerows([_cell(value) for value in row.values()] for row in rows)
    else:
        _write_table(table, rows, out)


def _write_table(table: pa.Table, rows: Iterator[dict[str, Any]], out: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Outside of a terminal, as in a pipe, columns have the width that they need.
    console = Console(file=out)
    if not console.is_terminal:
        console = Console(file=out, width=len(table.column_names) * (_CELL_CHARACTERS + 3))
    shown = Table(box=SIMPLE_HEAD)
    cells = [[_short(value) for value in row.values()] for row in rows]
    for name, *column in zip(table.column_names, *cells, strict=True):
        # What is long gives way to what is short.
        longest = max(map(len, (name, *column)))
        shown.add_column(Text(name), no_wrap=longest <= _SHORT_CHARACTERS, overflow="ellipsis")
    for row in cells:
        shown.add_row(*map(Text, row))
    console.print(shown)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        text = " ".join(map(_cell, value))
    else:
        text = _cell(value)
    text = " ".join(text.split())
    return text if len(text) <= _CELL_CHARACTERS else f"{text[: _CELL_CHARACTERS - 1]}…"


def _cell(value: object) -> str:
    """Returns a value as text; lists and structures as JSON."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _HARMFUL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _plain(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yields the rows with numbers that JSON has: NaN and infinite ones are None."""
    for batch in table.to_batches():
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            yield {name: _numbers(value) for name, value in row.items()}


def _numbers(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):  # a sum of integers
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return value
