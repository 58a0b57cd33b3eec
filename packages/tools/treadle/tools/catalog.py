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

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

import yaml

from treadle.agent_loop import SetupError, Tool, ToolSpec
from treadle.tools.arguments import did_you_mean

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
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read the tool catalogue {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SetupError(f"the tool catalogue {path} is not YAML: {error}") from error
    catalogue = _section(document, str(path), required=("tools",))
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
    fields = _section(entry, where, required=("class_name",), optional=("config", "tool_schema"))
    settings = dict(_mapping(fields.get("config", {}), f"{where}.config"))
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
    factory = _class(_text(fields["class_name"], f"{where}.class_name"), where)
    try:
        tool = factory(**arguments)
    except (SetupError, TypeError, ValueError) as error:
        raise SetupError(f"{where}: {error}") from error
    if not isinstance(getattr(tool, "spec", None), ToolSpec) or not hasattr(tool, "open"):
        raise SetupError(
            f"{where}: {factory.__qualname__} is no tool: it needs `spec`, a ToolSpec, and `open`"
        )
    return cast(Tool, tool)


def _class(name: str, where: str) -> type:
    target = VERL_CLASSES.get(name, name)
    if target.startswith("verl."):
        raise SetupError(
            f"{where}: {name} is a tool of verl that does not exist here; of verl's tools there "
            f"are: {', '.join(sorted(VERL_CLASSES))}"
        )
    module_name, _, class_name = target.rpartition(".")
    if not module_name:
        raise SetupError(f"{where}: class_name {name!r} is not of the form package.module.Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SetupError(f"{where}: cannot import {module_name}: {error}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        near = did_you_mean(class_name, [k for k, v in vars(module).items() if isinstance(v, type)])
        raise SetupError(f"{where}: {module_name} has no class {class_name!r}{near}")
    return found


def _spec(schema: object, where: str) -> ToolSpec:
    fields = _section(schema, where, required=("type", "function"))
    if fields["type"] != "function":
        raise SetupError(f"{where}.type must be function, not {fields['type']!r}")
    function = _section(
        fields["function"],
        f"{where}.function",
        required=("name", "description"),
        optional=("parameters", "strict"),
    )
    if function.get("strict", False) is not False:
        raise SetupError(f"{where}.function.strict must be false: sampling is not constrained")
    name = _text(function["name"], f"{where}.function.name")
    description = _text(function["description"], f"{where}.function.description")
    if "parameters" not in function:
        return ToolSpec(name=name, description=description)
    parameters = _mapping(function["parameters"], f"{where}.function.parameters")
    return ToolSpec(name=name, description=description, parameters=parameters)


def _section(
    value: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Mapping[str, object]:
    """The mapping `value`, which has all of the `required` keys and none that is not listed."""
    mapping = _mapping(value, where)
    for key in mapping:
        if key not in required + optional:
            raise SetupError(
                f"{where}: unknown key {key!r}{did_you_mean(key, required + optional)}; "
                f"known are: {', '.join(required + optional)}"
            )
    missing = [key for key in required if key not in mapping]
    if missing:
        raise SetupError(f"{where}: {', '.join(missing)} missing")
    return mapping


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise SetupError(f"{where} must be a mapping with text keys, not {value!r}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise SetupError(f"{where} must be a non-empty text, not {value!r}")
    return value
