"""The table of spans in docs/tracing_spans.md, as data."""

from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tracing_spans.md"
_SHARED = frozenset({"step", "validate", "experiment_name", "sample_index", "rollout_n"})

Spans = dict[tuple[str, str], set[str]]
"""Attributes by process and name of the span."""


def documented_spans() -> Spans:
    """Returns the spans of the page, without the attributes that all spans share."""
    table = PAGE.read_text(encoding="utf-8").partition("## What is recorded")[2].partition("\n\n")
    rows = table[2].partition("\n\n")[0].splitlines()[2:]
    found: Spans = {}
    for row in rows:
        name, process, _, attributes = (cell.strip() for cell in row.strip("|").split("|"))
        found[process, name.strip("`")] = {each.strip(" `") for each in attributes.split(",")} - {
            ""
        }
    return found


def add_span(spans: Spans, process: str, name: str, attributes: Mapping[str, object]) -> None:
    """Adds a span that was recorded, without the attributes that all spans share."""
    spans.setdefault((process, name), set()).update(attributes.keys() - _SHARED)
