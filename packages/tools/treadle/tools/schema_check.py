"""Checks the JSON Schema of a tool that a user wrote: a model learns from it what to call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

from treadle.agent_loop import SetupError, ToolSpec
from treadle.agent_loop.errors import did_you_mean

__all__ = ["check_schema"]

_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_LISTED: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_NOTES: Final = ("title", "description", "default", "example", "examples", "nullable", "format")
_NEAR: Final = 0.75
_MORE: Final = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "patternProperties")
"""Keywords by which an object may have properties that it does not list."""


def check_schema(spec: ToolSpec, where: str) -> None:
    """Rejects parameters that are no JSON Schema, or whose keywords are nearly some.

    JSON Schema ignores keywords that it does not define, `propertys` too; those far from any are
    left alone.

    Args:
        where: Names the place of the tool, for messages.

    Raises:
        SetupError: The schema is wrong; the message names the key, its value and the fix.
    """
    from jsonschema.exceptions import SchemaError, best_match
    from jsonschema.validators import Draft202012Validator, validator_for

    schema: Any = spec.parameters
    of = f"{where}: the tool {spec.name!r}: "
    kind = validator_for(schema, default=Draft202012Validator)
    wrong: SchemaError | None = best_match(kind(kind.META_SCHEMA).iter_errors(schema))
    if wrong is not None:
        key = ".".join(["parameters", *map(str, wrong.absolute_path)])
        raise SetupError(f"{of}{key} is no JSON Schema: {wrong.message}")
    known = {*kind.VALIDATORS, *_NOTES, *_NAMED, *_SINGLE}
    for key, part in _schemas(schema, "parameters"):
        for word in part.keys() - known:
            if near := get_close_matches(word, sorted(known), 1, _NEAR):
                raise SetupError(
                    f"{of}{key} has {word!r}, which JSON Schema does not define, did you mean "
                    f"{near[0]!r}?"
                )
        names = part.get("properties", {})
        for name in part.get("required", ()) if _lists_all(part) else ():
            if name not in names:
                raise SetupError(
                    f"{of}{key}.required has {name!r}, which is no property"
                    f"{did_you_mean(name, list(names))}; there are: {', '.join(names) or 'none'}"
                )


def _lists_all(part: Mapping[str, Any]) -> bool:
    """Returns whether a schema is an object with its own properties and no others."""
    return (
        part.get("type") == "object"
        and "properties" in part
        and not part.get("additionalProperties", False)
        and part.keys().isdisjoint(_MORE)
    )


def _schemas(schema: object, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields a schema and those in it, each with its place."""
    if not isinstance(schema, Mapping):
        return
    yield key, schema
    for word in _SINGLE:
        yield from _schemas(schema.get(word), f"{key}.{word}")
    for word in _NAMED:
        for name, part in schema.get(word, {}).items():
            yield from _schemas(part, f"{key}.{word}.{name}")
    for word in _LISTED:
        for number, part in enumerate(schema.get(word, ())):
            yield from _schemas(part, f"{key}.{word}.{number}")
