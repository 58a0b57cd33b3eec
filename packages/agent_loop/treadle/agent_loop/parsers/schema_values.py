"""Arguments written as plain text, converted by the tool's JSON schema.

qwen3_coder, glm and minimax write `<parameter=n>3</parameter>`: only the tool's schema
distinguishes the number 3 from the string "3". The rules, in this order:

1. If the schema allows the text as null, a boolean, a number, an array or an object, it is
   converted. Python's True, False and None, which some templates write, are accepted too. Null is
   also read where the schema allows neither null nor a string: the tool tells the model.
2. Otherwise it is a string. If the schema does not allow a string, the tool tells the model.
3. Without a type (unknown tool or argument, or a schema that allows anything), JSON is parsed,
   unless it is a quoted string: templates write strings without quotes.

Invariant: texts are parsed as JSON or not at all. Nothing is evaluated, nothing raises.
"""

from collections.abc import Iterator, KeysView, Mapping, Sequence

from treadle.agent_loop.parsers.json_text import CallError, decode_json
from treadle.agent_loop.types import ToolSpec

_LITERALS = {
    "null": ("null", None),
    "None": ("null", None),
    "true": ("boolean", True),
    "True": ("boolean", True),
    "false": ("boolean", False),
    "False": ("boolean", False),
}
_MAX_DEPTH = 8


class Schemas:
    """The schemas of a conversation's tools."""

    def __init__(self, tools: Sequence[ToolSpec] = ()) -> None:
        self._parameters = {tool.name: tool.parameters for tool in tools}

    @property
    def tools(self) -> KeysView[str]:
        """The names of the tools."""
        return self._parameters.keys()

    def fitting(self, arguments: Mapping[str, object]) -> str | None:
        """Returns the only tool that has these keys, and requires no others; None: not one has."""
        found = [
            tool
            for tool, schema in self._parameters.items()
            if arguments.keys() <= _keys(schema, "properties")
            and arguments.keys() >= _keys(schema, "required")
        ]
        return found[0] if len(found) == 1 else None

    def read(self, tool: str, argument: str, text: str) -> object:
        """Returns the value that `text` represents."""
        return read_as(text, self.of(tool, argument).types)

    def of(self, tool: str, argument: str) -> "ValueSchema":
        """Returns the schema of an argument, which allows anything if there is none."""
        parameters = self._parameters.get(tool, {})
        return ValueSchema(parameters, root=parameters).of_key(argument)


def _keys(schema: Mapping[str, object], part: str) -> set[object]:
    found = schema.get(part)
    return set(found) if isinstance(found, list | Mapping) else set()


class ValueSchema:
    """The schema of one value, and of the values in it.

    Args:
        schema: A JSON schema; anything else allows any value.
        root: The schema that local references in it lead into.
    """

    def __init__(self, schema: object, *, root: Mapping[str, object]) -> None:
        self._schema = schema
        self._root = root

    @property
    def types(self) -> frozenset[str]:
        """The JSON types that it allows; empty if it names none."""
        return types_of(self._schema, root=self._root)

    def of_key(self, key: str) -> "ValueSchema":
        """Returns the schema of the value of a key, if this is an object."""
        return self._inside("properties", key)

    def of_items(self) -> "ValueSchema":
        """Returns the schema of each item, if this is an array."""
        return self._inside("items", None)

    def _inside(self, part: str, key: str | None) -> "ValueSchema":
        for schema in _alternatives(self._schema, self._root):
            found = schema.get(part)
            if key is not None:
                found = found.get(key) if isinstance(found, Mapping) else None
            if found is not None:
                return ValueSchema(found, root=self._root)
        return ValueSchema(None, root=self._root)


def read_as(text: str, types: frozenset[str]) -> object:
    """Returns the value that `text` represents, of one of `types`; of any type if empty."""
    bare = text.strip()
    literal = _LITERALS.get(bare)
    if literal is not None and literal[0] in types:
        return literal[1]
    if literal is not None and literal[0] == "null" and types and "string" not in types:
        return None
    if types and not types & {"integer", "number", "array", "object"}:
        return text
    try:
        value, stop = decode_json(bare)
    except CallError:
        return text
    if stop < len(bare) or isinstance(value, str):
        return text
    if not types:
        return value
    if (
        isinstance(value, float)
        and value.is_integer()
        and types & {"integer", "number"} == {"integer"}
    ):
        value = int(value)
    return value if _types_of_value(value) & types else text


def types_of(schema: object, *, root: Mapping[str, object], depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a schema allows; empty if it names none."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    null = frozenset({"null"} if schema.get("nullable") is True else ())
    match schema:
        case {"$ref": str(path)}:
            return types_of(_resolve(path, root), root=root, depth=depth + 1)
        case {"type": str(name)}:
            return frozenset({name}) | null
        case {"type": [*names]}:
            return frozenset(name for name in names if isinstance(name, str)) | null
        case {"anyOf": [*choices]} | {"oneOf": [*choices]}:
            found = [types_of(choice, root=root, depth=depth + 1) for choice in choices]
            return frozenset().union(*found) | null if all(found) else frozenset()
        case {"allOf": [*parts]}:
            found = [types_of(part, root=root, depth=depth + 1) for part in parts]
            return next(filter(None, found), frozenset())
        case {"enum": [*values]}:
            return frozenset().union(*map(_types_of_value, values)) | null
        case {"const": value}:
            return _types_of_value(value)
        case _:
            return frozenset()


def _alternatives(
    schema: object, root: Mapping[str, object], depth: int = 0
) -> Iterator[Mapping[str, object]]:
    """Yields a schema and those that it refers to or is made of."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    if isinstance(path := schema.get("$ref"), str):
        yield from _alternatives(_resolve(path, root), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            for part in parts:
                yield from _alternatives(part, root, depth + 1)


def _resolve(path: str, root: Mapping[str, object]) -> object:
    """Returns the schema of a local reference such as "#/$defs/Point"."""
    place: object = root
    for part in path.removeprefix("#/").split("/"):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def _types_of_value(value: object) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})
