"""docs/trajectories.md: its tables are the schema, and its Python runs on files of that schema."""

import re
from pathlib import Path

import pyarrow as pa
import pytest

from treadle.tracing.trajectories import COLUMNS, FILTER_COLUMNS, SCHEMA, SCHEMA_VERSION
from treadle.tracing.trajectories.testing import write_run

PAGE = (Path(__file__).parents[2] / "docs" / "trajectories.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def table(heading: str) -> list[list[str]]:
    match = re.search(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert match is not None, f"there is no table {heading}"
    rows = [line.split("|")[1:-1] for line in match[1].splitlines()]
    return [[cell.strip() for cell in row] for row in rows]


def text(kind: pa.DataType, *, nullable: bool) -> str:
    """Returns a type as the page writes it."""
    if pa.types.is_list(kind):
        said = f"list of {text(kind.value_type, nullable=False)}"
    elif pa.types.is_map(kind):
        said = f"map of {kind.key_type} to {kind.item_type}"
    elif pa.types.is_struct(kind):
        said = "struct"
    else:
        said = str(kind)
    return f"{said}, null" if nullable else said


def fields(name: str, kind: pa.DataType) -> list[tuple[str, str]]:
    """Returns (path, type) of what structs have, depth first."""
    if pa.types.is_list(kind):
        return fields(name, kind.value_type)
    if not pa.types.is_struct(kind):
        return []
    return [
        found
        for field in kind
        for found in (
            (f"`{name}.{field.name}`", text(field.type, nullable=field.nullable)),
            *fields(f"{name}.{field.name}", field.type),
        )
    ]


def test_the_columns_are_those_of_the_schema() -> None:
    written = [(f"`{c.name}`", text(c.type, nullable=c.nullable), c.doc) for c in COLUMNS]
    assert [tuple(row) for row in table("column")] == written


def test_the_fields_are_those_of_the_schema() -> None:
    written = [found for field in SCHEMA for found in fields(field.name, field.type)]
    assert [tuple(row[:2]) for row in table("field")] == written


def test_the_names_that_filters_know_are_written() -> None:
    (line,) = re.findall(r"^Conditions know (.*?)\.$", PAGE, re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", line) == list(FILTER_COLUMNS)
    assert f"`treadle.trajectories.version` is {SCHEMA_VERSION}" in PAGE


@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_of_the_page_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "import pandas" in block:
        pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "RUN")
    exec(compile(block, "trajectories.md", "exec"), {})


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 4
