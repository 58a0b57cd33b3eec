"""Function tools: turn a Python function with its signature and its docstring into a tool.

Invariant: the function only gets arguments that fit its schema. Other arguments are the model's
fault and become a `ToolFailure`; the function is not called.

    @function_tool
    async def weather(city: str, days: int = 1) -> str:
        '''Tells the weather of a city.'''
        return await service.forecast(city, days)

An `Args:` section of the docstring, in Google style, describes the parameters to the model. A
plain function runs on a thread, so that it does not block the event loop. It cannot be cancelled
there: if it does not end in time, its thread is left behind. A function that may hang should be
`async`.
"""

import inspect
import re
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from treadle.agent_loop.tools.tool import ToolFailure, ToolResult
from treadle.agent_loop.types import AgentTask, ToolSpec
from treadle.agent_loop.user_calls import result_of

_JSON_TYPES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
}
_ARGS_SECTION = re.compile(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)
_ARG_LINE = re.compile(r"^(\w+)(?: \(.*?\))?: (.*)$")

ToolFunction = Callable[..., Awaitable[str | ToolResult]] | Callable[..., str | ToolResult]
"""A function that `FunctionTool` makes a tool of; plain or async."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A function as a tool. It keeps no state between calls, so it is its own session.

    Attributes:
        spec: The description for the model.
    """

    spec: ToolSpec
    function: ToolFunction

    async def open(self, task: AgentTask) -> "FunctionTool":
        """Returns itself."""
        return self

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Calls the function.

        Raises:
            ToolFailure: The arguments do not fit the schema, or the function raised it.
        """
        call = partial(self.function, **_checked(self.spec.parameters, arguments))
        result = await result_of(f"tool {self.spec.name!r}", call)
        return result if isinstance(result, ToolResult) else ToolResult(content=str(result))

    async def aclose(self) -> None:
        """Does nothing; there is nothing to free."""


def function_tool(function: ToolFunction) -> FunctionTool:
    """Makes a tool from a function with type hints and a docstring.

    Args:
        function: Plain or async; returns a string or a `ToolResult`. Parameters may be str, int,
            float, bool, list[...], dict[str, ...], `Literal` of strings, or one of these or None.

    Raises:
        TypeError: The function has no docstring, or a parameter cannot be described.
    """
    return FunctionTool(spec=described(function), function=function)


def described(function: Callable[..., object], *, of_class: bool = False) -> ToolSpec:
    """Returns the description of a function for the model, see `function_tool`.

    Args:
        of_class: It is a method of a class; its first parameter is the instance.
    """
    name = getattr(function, "__name__", repr(function))
    doc = inspect.getdoc(function)
    if not doc:
        raise TypeError(f"the tool function {name} has no docstring: describe it for the model")
    texts = _argument_docs(doc)
    hints = typing.get_type_hints(function)
    properties: dict[str, object] = {}
    required: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[of_class:]:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not by_name or parameter.name not in hints:
            raise TypeError(
                f"parameter {parameter.name!r} of {name} needs a type hint and must be passable by "
                "name"
            )
        schema = _schema(hints[parameter.name], f"parameter {parameter.name!r} of {name}")
        if text := texts.get(parameter.name):
            schema["description"] = text
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return ToolSpec(
        name=name,
        description=_ARGS_SECTION.split(doc)[0].split("\nReturns:")[0].strip(),
        parameters={"type": "object", "properties": properties, "required": required},
    )


def _schema(hint: object, where: str) -> dict[str, object]:
    """Returns the JSON Schema of a parameter's type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        some = [a for a in arguments if a is not type(None)]
        if len(some) == 1 and len(some) < len(arguments):
            schema = _schema(some[0], where)
            schema["nullable"] = True
            return schema
    elif origin is typing.Literal and all(isinstance(a, str) for a in arguments):
        return {"type": "string", "enum": list(arguments)}
    elif origin is list:
        return {"type": "array", "items": _schema(arguments[0], where)}
    elif origin is dict and arguments[0] is str:
        return {"type": "object"}
    elif isinstance(hint, type) and hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    raise TypeError(f"{where} has the type {hint!r}, which is not supported")


def _argument_docs(doc: str) -> dict[str, str]:
    """Parses the Args section of a docstring."""
    section = _ARGS_SECTION.search(doc)
    if section is None:
        return {}
    described: dict[str, str] = {}
    name = None
    for line in inspect.cleandoc("\n" + section[1]).splitlines():
        if not line.startswith(" ") and (match := _ARG_LINE.match(line)):
            name = match[1]
            described[name] = match[2].strip()
        elif name is not None and line.strip():
            described[name] += " " + line.strip()
    return described


def _checked(
    parameters: Mapping[str, object], arguments: Mapping[str, object]
) -> dict[str, object]:
    """Returns arguments that fit a schema made by `function_tool`."""
    properties = typing.cast(Mapping[str, Mapping[str, object]], parameters["properties"])
    required = typing.cast(list[str], parameters["required"])
    if missing := [name for name in required if name not in arguments]:
        raise ToolFailure(f"missing argument: {', '.join(missing)}")
    if unknown := [name for name in arguments if name not in properties]:
        raise ToolFailure(f"unknown argument: {', '.join(unknown)}; known: {', '.join(properties)}")
    checked = {name: _with_integers(value, properties[name]) for name, value in arguments.items()}
    for name, value in checked.items():
        if not _fits(value, properties[name]):
            raise ToolFailure(
                f"argument {name} is {value!r}; expected {_expected(properties[name])}"
            )
    return checked


def _with_integers(value: object, schema: Mapping[str, object]) -> object:
    """Returns the value with 3 for 3.0 where the schema, as JSON Schema, makes no difference."""
    if schema["type"] == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if schema["type"] == "array" and isinstance(value, list):
        items = typing.cast(Mapping[str, object], schema["items"])
        return [_with_integers(item, items) for item in value]
    return value


def _fits(value: object, schema: Mapping[str, object]) -> bool:
    if value is None:
        return bool(schema.get("nullable"))
    match schema["type"]:
        case "string":
            options = typing.cast(list[str] | None, schema.get("enum"))
            return isinstance(value, str) and (options is None or value in options)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
            return abs(value) <= sys.float_info.max  # an integer may be beyond what floats are
        case "array":
            items = typing.cast(Mapping[str, object], schema["items"])
            return isinstance(value, list) and all(_fits(item, items) for item in value)
        case _:
            return isinstance(value, dict)


def _expected(schema: Mapping[str, object]) -> str:
    if "enum" in schema:
        return f"one of {schema['enum']}"
    return f"{schema['type']} or null" if schema.get("nullable") else str(schema["type"])
