"""Tests of arguments that are written as plain text."""

import pytest

from treadle.agent_loop import ToolSpec
from treadle.agent_loop.parsers.schema_values import Schemas, read_as, types_of


def kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", kinds("integer"), 3),
        (" 3\n", kinds("integer"), 3),
        ("3.0", kinds("integer"), 3),
        ("3.0", kinds("number"), 3.0),
        ("3.5", kinds("integer"), "3.5"),
        ("three", kinds("integer"), "three"),
        ("3", kinds("string"), "3"),
        ("3", kinds("string", "integer"), 3),
        (" a ", kinds("string", "integer"), " a "),
        ("true", kinds("boolean"), True),
        ("True", kinds("boolean"), True),
        ("yes", kinds("boolean"), "yes"),
        ("true", kinds("integer"), "true"),
        ("null", kinds("string", "null"), None),
        ("None", kinds("integer", "null"), None),
        ("null", kinds("string"), "null"),
        ("null", kinds("integer"), None),
        ("None", kinds("array", "object"), None),
        ("null", kinds("integer", "string"), "null"),
        ('{"a": 1}', kinds("object"), {"a": 1}),
        ("{'a': 1}", kinds("object"), "{'a': 1}"),
        ("[1]", kinds("object"), "[1]"),
        ("[1]", kinds("array", "string"), [1]),
        ("NaN", kinds("number"), "NaN"),
        ("1e999", kinds("number"), "1e999"),
        ("9" * 5000, kinds("integer"), "9" * 5000),
        ("__import__('os')", kinds("object"), "__import__('os')"),
        # Of any type: JSON, but texts have no quotes.
        ("3", kinds(), 3),
        ("true", kinds(), True),
        ("True", kinds(), "True"),
        ('"3"', kinds(), '"3"'),
        ("[1] and more", kinds(), "[1] and more"),
        ("", kinds(), ""),
    ],
)
def test_a_text_is_read_by_its_types(text: str, types: frozenset[str], value: object) -> None:
    read = read_as(text, types)
    assert (read, type(read)) == (value, type(value))


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, kinds("string")),
        ({"type": ["integer", "null"]}, kinds("integer", "null")),
        ({"type": "integer", "nullable": True}, kinds("integer", "null")),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, kinds("integer", "null")),
        ({"oneOf": [{"type": "integer"}, {}]}, kinds()),
        ({"allOf": [{"title": "T"}, {"type": "array"}]}, kinds("array")),
        ({"$ref": "#/$defs/Point"}, kinds("object")),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, kinds("object", "null")),
        ({"$ref": "#/$defs/Self"}, kinds()),
        ({"$ref": "https://example.org"}, kinds()),
        ({"enum": ["a", 1, None]}, kinds("string", "integer", "number", "null")),
        ({"const": False}, kinds("boolean")),
        ({}, kinds()),
        (True, kinds()),
        ({"type": 3}, kinds()),
    ],
)
def test_the_types_of_a_schema(schema: object, types: frozenset[str]) -> None:
    root = {"$defs": {"Point": POINT, "Self": {"$ref": "#/$defs/Self"}}}
    assert types_of(schema, root=root) == types


def test_a_tool_or_an_argument_that_is_not_known_takes_anything() -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "string"}}}
    schemas = Schemas([ToolSpec(name="f", description="", parameters=parameters)])
    assert schemas.read("f", "n", "3") == "3"
    assert schemas.read("f", "m", "3") == 3
    assert schemas.read("g", "n", "3") == 3
    assert Schemas([ToolSpec(name="f", description="", parameters={})]).read("f", "n", "3") == 3
