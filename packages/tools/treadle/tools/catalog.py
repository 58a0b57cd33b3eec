"""The tool catalogue: a YAML file in verl's `tool_config` shape, read into tools.

Invariant: every key of the file is used or refused, with the file and the place in it; nothing is
ignored. A tool's own settings are checked by the tool. Reading happens once, at start; nobody
waits.

    tools:
      - class_name: treadle.tools.calculator.CalculatorTool
        config: {type: native}                # what else is in here goes to the tool
        tool_schema:                          # what the model is told; the tool's own if left out
          type: function
          function: {name: calculator, description: ..., parameters: {type: object, ...}}

`class_name` is a class of this package, verl's name of the same tool, or the dotted path of a
class of your own. A class is called as `Class(config=..., spec=...)`, without `spec` where
`tool_schema` is left out, and gives a `treadle.agent_loop.Tool`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

from treadle.agent_loop import SetupError, Tool, ToolSpec
from treadle.tools.documents import load_class, mapping, read_yaml, section, text

VERL_CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {"verl.tools.gsm8k_tool.Gsm8kTool": "treadle.tools.gsm8k.Gsm8kTool"}
)
"""verl's class names of tools that exist here."""


def load_catalogue(path: Path) -> Mapping[str, Tool]:
    """Read the tools of a catalogue.

    Args:
        path: The YAML file.

    Returns:
        The name that the model calls to the tool, in the order of the file.

    Raises:
        SetupError: The file cannot be read, has an unknown or missing key or a value of the wrong
            type, names a class that cannot be loaded or refuses its settings, or two tools have
            one name. The message says where in the file.
    """
    document = read_yaml(path, "tool catalogue")
    catalogue = section(document, str(path), required=("tools",))
    entries = catalogue["tools"]
    if not isinstance(entries, list) or not entries:
        raise SetupError(f"{path}: tools must be a list with at least one tool, not {entries!r}")
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(entries):
        where = f"{path}: tools[{index}]"
        tool = _tool(entry, where)
        if tool.spec.name in tools:
            raise SetupError(f"{where}: there already is a tool {tool.spec.name!r}")
        tools[tool.spec.name] = tool
    return MappingProxyType(tools)


def _tool(entry: object, where: str) -> Tool:
    fields = section(entry, where, required=("class_name",), optional=("config", "tool_schema"))
    settings = dict(mapping(fields.get("config", {}), f"{where}.config"))
    kind = settings.pop("type", "native")
    if kind == "mcp":
        raise SetupError(
            f"{where}: tools of type mcp are not supported. Write a class whose session calls the "
            "MCP server, and name it in class_name with type native"
        )
    if kind != "native":
        raise SetupError(f"{where}.config.type must be native, not {kind!r}")
    arguments: dict[str, object] = {"config": settings}
    if "tool_schema" in fields:
        arguments["spec"] = _spec(fields["tool_schema"], f"{where}.tool_schema")
    factory = load_class(
        text(fields["class_name"], f"{where}.class_name"), where, verl=VERL_CLASSES, kind="tool"
    )
    try:
        tool = factory(**arguments)
    except (SetupError, TypeError, ValueError) as error:
        raise SetupError(f"{where}: {error}") from error
    if not isinstance(getattr(tool, "spec", None), ToolSpec) or not hasattr(tool, "open"):
        raise SetupError(
            f"{where}: {factory.__qualname__} is no tool: it needs `spec`, a ToolSpec, and `open`"
        )
    return cast(Tool, tool)


def _spec(schema: object, where: str) -> ToolSpec:
    fields = section(schema, where, required=("type", "function"))
    if fields["type"] != "function":
        raise SetupError(f"{where}.type must be function, not {fields['type']!r}")
    function = section(
        fields["function"],
        f"{where}.function",
        required=("name", "description"),
        optional=("parameters", "strict"),
    )
    if function.get("strict", False) is not False:
        raise SetupError(f"{where}.function.strict must be false: sampling is not constrained")
    name = text(function["name"], f"{where}.function.name")
    description = text(function["description"], f"{where}.function.description")
    if "parameters" not in function:
        return ToolSpec(name=name, description=description)
    parameters = mapping(function["parameters"], f"{where}.function.parameters")
    return ToolSpec(name=name, description=description, parameters=parameters)
