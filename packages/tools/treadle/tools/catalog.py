"""The tool catalogue: a YAML file in verl's `tool_config` shape, read into tools.

Invariant: every key of the file is used, or an error that names the file and the place; none is
ignored. A tool's own settings are checked by the tool. Reading happens once, at start.

    tools:
      - class_name: treadle.tools.calculator.CalculatorTool
        config: {type: native}                # other keys go to the tool
        tool_schema:                          # shown to the model; default: the tool's
          type: function
          function: {name: calculator, description: ..., parameters: {type: object, ...}}

      - function: my_tools.py:divide          # or package.module:divide, typed and with a docstring
      - class_name: treadle.tools.mcp.McpTool # the tools of MCP servers
        config: {type: mcp, rate_limit: 120}
        mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}

`class_name` is a class of this package, verl's name of the same tool, or your own class as
`file.py:Class` or its dotted path. A class with a `spec` and `open` is called with those of
`config=..., spec=...` that it takes, and gives a `treadle.agent_loop.Tool`. Of another class every
typed public method is a tool (`class_tools`), and `config` has arguments of its constructor.

In place of a catalogue stands `file.py:Class`, or a Python file with functions under
`@function_tool` (verl's `function_tool_path`): all of them are tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

from treadle.agent_loop import (
    FunctionTool,
    SetupError,
    Tool,
    ToolSpec,
    class_tools,
    function_tool,
    load_import_path,
)
from treadle.tools.arguments import require_extra
from treadle.tools.isolated import isolated
from treadle.tools.schema_check import check_schema
from treadle.tools.yaml_config import load_class, mapping, read_yaml, section, string

MCP_CLASS: Final = "treadle.tools.mcp.McpTool"
VERL_CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "recipe.retool.retool.CustomSandboxFusionTool": (
            "treadle.tools.code_interpreter.RetoolCodeInterpreterTool"
        ),
        "verl.tools.geo3k_tool.Geo3kTool": "treadle.tools.geometry3k.Geometry3kTool",
        "verl.tools.gsm8k_tool.Gsm8kTool": "treadle.tools.gsm8k.Gsm8kTool",
        "verl.tools.mcp_base_tool.MCPBaseTool": MCP_CLASS,
        "verl.tools.sandbox_fusion_tools.SandboxFusionTool": (
            "treadle.tools.code_interpreter.CodeInterpreterTool"
        ),
        "verl.tools.search_tool.SearchTool": "treadle.tools.search.SearchTool",
    }
)
"""verl's class names of tools that exist here."""


def load_catalogue(path: Path) -> Mapping[str, Tool]:
    """Reads the tools of a catalogue.

    Args:
        path: The YAML file, a Python file with tools, or `file.py:Class`.

    Returns:
        The name that the model calls to the tool, in the order of the file.

    Raises:
        SetupError: The file cannot be read, has an unknown or missing key or a value of the wrong
            type, names a class that cannot be loaded or refuses its settings, or two tools have
            one name. The message gives the location in the file, one line for each tool.
    """
    if ".py:" in path.name:
        return MappingProxyType({tool.spec.name: tool for tool in _own(str(path), str(path), None)})
    if path.suffix == ".py":
        functions = _functions_of(path)
        return MappingProxyType(
            {
                name: isolated(tool, partial(_function_of, path, name))
                for name, tool in functions.items()
            }
        )
    document = read_yaml(path, "tool catalogue")
    catalogue = section(document, str(path), required=("tools",))
    entries = catalogue["tools"]
    if not isinstance(entries, list) or not entries:
        raise SetupError(f"{path}: tools must be a list with at least one tool, got {entries!r}")
    tools: dict[str, Tool] = {}
    errors: list[SetupError] = []
    for index, entry in enumerate(entries):
        where = f"{path}: tools[{index}]"
        try:
            for tool in _tools(entry, where, path.parent):
                if tool.spec.name in tools:
                    raise SetupError(f"{where}: there already is a tool {tool.spec.name!r}")
                tools[tool.spec.name] = tool
        except SetupError as error:
            errors.append(error)
    if errors:
        raise SetupError("\n".join(map(str, errors))) from errors[0]
    return MappingProxyType(tools)


def _functions_of(path: Path) -> Mapping[str, FunctionTool]:
    """Returns the tools that a Python file defines, in its order, by name."""
    try:
        names = load_import_path(f"{path}:__dict__", "tool")
    except SetupError as error:
        if "No module named 'verl" not in str(error):
            raise
        raise SetupError(
            f"{error}; here it is `from treadle.agent_loop import function_tool`"
        ) from error
    values = cast(Mapping[str, object], names).values()
    by_place = {id(value): value for value in values if isinstance(value, FunctionTool)}
    tools = list(by_place.values())  # a second name of a tool is not a second tool
    if not tools:
        raise SetupError(
            f"{path} has no tool: write `@function_tool` of treadle.agent_loop above its functions"
        )
    by_name: dict[str, FunctionTool] = {}
    for tool in tools:
        if tool.spec.name in by_name:
            raise SetupError(f"{path}: there already is a tool {tool.spec.name!r}")
        by_name[tool.spec.name] = tool
    return by_name


def _function_of(path: Path, name: str) -> FunctionTool:
    return _functions_of(path)[name]


def _tools(entry: object, where: str, base: Path) -> Sequence[Tool]:
    """Returns the tools of one entry: one, or those of MCP servers."""
    keys = mapping(entry, where)
    if "function" in keys:
        return _function(keys, where, base)
    fields = section(
        entry, where, required=("class_name",), optional=("config", "tool_schema", "mcp")
    )
    settings = dict(mapping(fields.get("config", {}), f"{where}.config"))
    kind = settings.pop("type", "native")
    if kind == "mcp":
        return _mcp_tools(fields, settings, where)
    if kind != "native":
        raise SetupError(f"{where}.config.type must be native or mcp, got {kind!r}")
    if "mcp" in fields:
        raise SetupError(f"{where}.mcp is for tools with config.type mcp")
    return _native(fields, settings, where, base)


def _native(
    fields: Mapping[str, object], settings: Mapping[str, object], where: str, base: Path
) -> Sequence[Tool]:
    arguments: dict[str, object] = {"config": settings}
    if "tool_schema" in fields:
        arguments["spec"] = tool_spec(fields["tool_schema"], f"{where}.tool_schema")
    factory = load_class(
        string(fields["class_name"], f"{where}.class_name"),
        where,
        verl=VERL_CLASSES,
        kind="tool",
        base=base,
    )
    return _of_class(factory, arguments, where)


def _of_class(factory: type, arguments: Mapping[str, object], where: str) -> Sequence[Tool]:
    """Returns what a class is: one tool, or its methods as tools.

    Args:
        arguments: `config`, and `spec` where the catalogue has one.
    """
    try:
        if not hasattr(factory, "open"):
            if "spec" in arguments:
                raise TypeError(f"tool_schema is for a class with `open`: {factory.__qualname__}")
            settings = cast(Mapping[str, object], arguments["config"])
            return list(class_tools(factory, settings).values())
        taken = inspect.signature(factory).parameters
        every = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        # What says nothing is left out where a class has no place for it.
        given = {k: v for k, v in arguments.items() if v or k != "config" or every or k in taken}
        tool = factory(**given)
    except (SetupError, TypeError, ValueError) as error:
        raise SetupError(f"{where}: {error}") from error
    if not _is_tool(tool):
        raise SetupError(
            f"{where}: {factory.__qualname__} is not a tool: it needs a ToolSpec `spec` and `open`"
        )
    if "spec" in arguments or not factory.__module__.startswith("treadle."):
        check_schema(tool.spec, where)
    return [cast(Tool, tool)]


def _is_tool(value: object) -> bool:
    return isinstance(getattr(value, "spec", None), ToolSpec) and hasattr(value, "open")


def _function(fields: Mapping[str, object], where: str, base: Path) -> Sequence[Tool]:
    section(fields, where, required=("function",))
    reference = string(fields["function"], f"{where}.function")
    return _own(reference, f"{where}.function", base)


def _own(reference: str, where: str, base: Path | None) -> Sequence[Tool]:
    """Returns the tools of your own code: those of a class, a tool, or a function."""
    load = partial(_load_function, reference, base)
    try:
        found = load_import_path(reference, "tool", base=base)
        if isinstance(found, type):
            return _of_class(found, {"config": {}}, where)
        if _is_tool(found) and not isinstance(found, FunctionTool):
            check_schema(cast(Tool, found).spec, where)
            return [cast(Tool, found)]
        return [isolated(load(), load)]
    except (SetupError, TypeError, ValueError) as error:
        raise SetupError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error


def _load_function(reference: str, base: Path | None) -> FunctionTool:
    function = load_import_path(reference, "tool", base=base)
    if isinstance(function, FunctionTool):
        return function
    if not callable(function):
        raise TypeError(f"{reference} is not a function")
    return function_tool(function)


def _mcp_tools(
    fields: Mapping[str, object], settings: Mapping[str, object], where: str
) -> Sequence[Tool]:
    require_extra(where, "mcp", "mcp")
    from treadle.tools.mcp import discover, read_servers

    name = string(fields["class_name"], f"{where}.class_name")
    if VERL_CLASSES.get(name, name) != MCP_CLASS or "tool_schema" in fields:
        raise SetupError(
            f"{where}: tools of type mcp have the class_name {MCP_CLASS}, not {name}, and no "
            "tool_schema: the server tells it"
        )
    known = section(settings, f"{where}.config", required=(), optional=("rate_limit", "timeout"))
    place = f"{where}.mcp"
    mcp = section(
        fields.get("mcp", {}),
        place,
        required=("mcp_servers_config_path",),
        optional=("tool_selected_list",),
    )
    path = string(mcp["mcp_servers_config_path"], f"{place}.mcp_servers_config_path")
    selected = mcp.get("tool_selected_list", [])
    if not isinstance(selected, list) or not all(isinstance(tool, str) for tool in selected):
        raise SetupError(f"{place}.tool_selected_list must be a list of names, got {selected!r}")
    rate_limit, timeout = known.get("rate_limit", 120), known.get("timeout")
    if isinstance(rate_limit, bool) or not isinstance(rate_limit, int) or rate_limit < 1:
        raise SetupError(
            f"{where}.config.rate_limit must be an integer above 0, got {rate_limit!r}"
        )
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0
    ):
        raise SetupError(f"{where}.config.timeout must be seconds above 0, got {timeout!r}")
    try:
        return discover(
            read_servers(Path(path)), selected=selected, rate_limit=rate_limit, timeout_s=timeout
        )
    except SetupError as error:
        raise SetupError(f"{where}: {error}") from error


def tool_spec(schema: object, where: str) -> ToolSpec:
    """Returns the description of a tool that OpenAI's function schema gives.

    Raises:
        SetupError: It is not such a schema.
    """
    fields = section(schema, where, required=("type", "function"))
    if fields["type"] != "function":
        raise SetupError(f"{where}.type must be function, got {fields['type']!r}")
    function = section(
        fields["function"],
        f"{where}.function",
        required=("name", "description"),
        optional=("parameters", "strict"),
    )
    if function.get("strict", False) is not False:
        raise SetupError(f"{where}.function.strict must be false: sampling is not constrained")
    name = string(function["name"], f"{where}.function.name")
    description = string(function["description"], f"{where}.function.description")
    if "parameters" not in function:
        return ToolSpec(name=name, description=description)
    parameters = mapping(function["parameters"], f"{where}.function.parameters")
    return ToolSpec(name=name, description=description, parameters=parameters)
