from collections.abc import Mapping

import pytest

from treadle.agent_loop import SetupError, ToolSpec
from treadle.tools.schema_check import check_schema


def check(parameters: Mapping[str, object]) -> None:
    check_schema(ToolSpec(name="guess", description="", parameters=parameters), "tools.yaml")


def test_what_is_a_schema_passes_with_keywords_of_others() -> None:
    number = {"type": "integer", "nullable": True, "x-order": 1, "format": "int32"}
    check({"type": "object", "properties": {"required": number}, "required": ["required"]})
    check({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": number}})
    check({"type": "object", "properties": {"propertys": {"anyOf": [number, {"type": "null"}]}}})
    check({})


@pytest.mark.parametrize(
    "rest",
    [
        {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]},
        {"allOf": [{"required": ["a"]}]},
        {"allOf": [{"properties": {"x": {}}}], "required": ["x"]},
        {"if": {"properties": {"a": {}}, "required": ["c"]}, "then": {"required": ["a"]}},
        {"$ref": "#/$defs/more", "$defs": {"more": {"properties": {"x": {}}}}, "required": ["x"]},
        {"additionalProperties": True, "required": ["x"]},
        {"additionalProperties": {"type": "string"}, "required": ["x"]},
        {"patternProperties": {"^x": {}}, "required": ["x"]},
    ],
)
def test_a_required_property_may_be_of_another_part(rest: Mapping[str, object]) -> None:
    check({"type": "object", "properties": {"a": {}, "c": {}}, **rest})


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"type": "object", "propertys": {}}, "has 'propertys'.*did you mean 'properties'"),
        (
            {"properties": {"number": {"type": "integr"}}},
            r"parameters\.properties\.number\.type is no JSON Schema: 'integr' is not valid",
        ),
        (
            {"type": "object", "properties": {"number": {}}, "required": ["nmber"]},
            r"required has 'nmber', which is no property, did you mean 'number'",
        ),
        ({"properties": {"n": {"items": {"enmu": [1]}}}}, r"properties\.n\.items has 'enmu'"),
        ({"required": "number"}, r"parameters\.required is no JSON Schema: 'number'"),
    ],
)
def test_what_is_none_is_refused_with_its_place(parameters: dict[str, object], why: str) -> None:
    with pytest.raises(SetupError, match=f"^tools.yaml: the tool 'guess': .*{why}"):
        check(parameters)
