import asyncio
import importlib.util
import re
from pathlib import Path

import pytest

from treadle.agent_loop import (
    FunctionTool,
    SetupError,
    ToolError,
    ToolFailure,
    ToolResult,
    load_import_path,
)
from treadle.tools import CalculatorTool, Gsm8kTool, load_catalogue
from treadle.tools.catalog import VERL_CLASSES
from treadle.tools.yaml_config import load_class

SCHEMA = """
    tool_schema:
      type: function
      function:
        name: calc
        description: Compute.
        parameters: {type: object, properties: {expression: {type: string}}, required: [expression]}
"""
MCP = "tools:\n  - class_name: treadle.tools.mcp.McpTool\n    config: {type: mcp}\n"
SERVERS = "    mcp: {mcp_servers_config_path: absent.json}\n"
CALCULATOR = "tools:\n  - class_name: treadle.tools.calculator.CalculatorTool\n"


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    return tmp_path / "tools.yaml"


def test_verls_catalogue_of_the_gsm8k_tool_is_read_as_it_is(catalogue: Path) -> None:
    catalogue.write_text(
        """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer."
          required: ["answer"]
"""
    )
    (tool,) = load_catalogue(catalogue).values()
    assert isinstance(tool, Gsm8kTool)
    assert tool.spec.name == "calc_gsm8k_reward"
    assert tool.spec.parameters["required"] == ["answer"]


def test_the_schema_of_the_file_is_what_the_model_is_told(catalogue: Path) -> None:
    catalogue.write_text(CALCULATOR + SCHEMA)
    tools = load_catalogue(catalogue)
    assert list(tools) == ["calc"]
    assert tools["calc"].spec.description == "Compute."


def test_a_tool_without_schema_has_its_own(catalogue: Path) -> None:
    catalogue.write_text(CALCULATOR)
    assert load_catalogue(catalogue)["calculator"].spec == CalculatorTool().spec


def test_a_class_of_the_users_own_gets_its_settings(
    tmp_path: Path, catalogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tools.py").write_text(
        "class Mine:\n"
        "    def __init__(self, *, config, spec):\n"
        "        if config['limit'] > 9: raise ValueError('limit must be at most 9')\n"
        "        self.spec = spec\n"
        "    async def open(self, task): ...\n"
        "class NoTool:\n"
        "    def __init__(self, config): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = "tools:\n  - class_name: my_tools.Mine\n    config: {limit: %d}\n" + SCHEMA
    catalogue.write_text(entry % 3)
    assert list(load_catalogue(catalogue)) == ["calc"]
    catalogue.write_text(entry % 10)
    with pytest.raises(SetupError, match=r"tools\[0\]: limit must be at most 9"):
        load_catalogue(catalogue)
    catalogue.write_text("tools:\n  - class_name: my_tools.NoTool\n")
    with pytest.raises(SetupError, match="NoTool has no public method: each one, with types"):
        load_catalogue(catalogue)


def test_every_alias_of_verl_leads_to_a_tool(catalogue: Path) -> None:
    for name, target in VERL_CLASSES.items():
        found = load_class(name, str(catalogue), verl=VERL_CLASSES, kind="tool")
        assert f"{found.__module__}.{found.__qualname__}".startswith(target.rpartition(".")[0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tols: []", r"unknown key 'tols', did you mean 'tools'\?"),
        ("{}", "tools missing"),
        ("tools: []", "at least one tool"),
        ("- a", "must be a mapping"),
        ("tools: [", "is not YAML"),
        ("tools: [{config: {}}]", r"tools\[0\]: class_name missing"),
        ("tools: [{clas_name: a}]", r"tools\[0\]: unknown key 'clas_name', did you mean"),
        ("tools: [{class_name: 3}]", "class_name must be a non-empty string, got 3"),
        ("tools: [{class_name: Calculator}]", "neither package.module.Class nor file.py:Class"),
        ("tools: [{class_name: no_such.Tool}]", "cannot import no_such"),
        (
            "tools: [{class_name: treadle.tools.calculator.CalculatorTol}]",
            "has no class 'CalculatorTol', did you mean 'CalculatorTool'",
        ),
        (
            "tools: [{class_name: verl.tools.image_zoom_in_tool.ImageZoomInTool}]",
            "a tool of verl that does not exist here; .* verl.tools.gsm8k_tool.Gsm8kTool",
        ),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "class_name treadle.tools.mcp.McpTool"),
        ("tools: [{class_name: a.B, mcp: {}}]", "mcp is for tools with config.type mcp"),
        (MCP + "    mcp: {}\n", "mcp_servers_config_path missing"),
        (MCP + "    mcp: {mcp_servers_config_path: absent.json}\n", "absent.json: No such file"),
        (MCP.replace("type", "rate_limit: 0, type") + SERVERS, "above 0, got 0"),
        (MCP.replace("type", "timeout: soon, type") + SERVERS, "seconds above 0, got 'soon'"),
        ("tools: [{function: absent.py:f}]", "the tool file .*/absent.py does not exist"),
        ("tools: [{function: math:pi}]", "math:pi is not a function"),
        ("tools: [{function: 'math:sqrt', config: {}}]", "unknown key 'config'"),
        (
            "tools: [{class_name: a.B, config: {type: remote}}]",
            "must be native or mcp, got 'remote'",
        ),
        ("tools: [{class_name: a.B, config: 3}]", "config must be a mapping"),
        (CALCULATOR + "    config: {rate_limit: 3}", "has no settings; remove 'rate_limit'"),
        (CALCULATOR + SCHEMA.replace("type: function", "type: tool"), "must be function"),
        (CALCULATOR + SCHEMA.replace("name: calc", "nam: calc"), "did you mean 'name'"),
        (CALCULATOR + SCHEMA.replace("name: calc", "name: ''"), "non-empty string"),
        (CALCULATOR + SCHEMA + "        strict: true\n", "strict must be false"),
        (CALCULATOR + CALCULATOR.removeprefix("tools:\n"), "already is a tool 'calculator'"),
    ],
)
def test_mistakes_are_named_with_their_place(catalogue: Path, text: str, why: str) -> None:
    catalogue.write_text(text)
    with pytest.raises(SetupError, match=why) as error:
        load_catalogue(catalogue)
    assert str(catalogue) in str(error.value)


def test_a_missing_file_is_named(catalogue: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot read .*tools\.yaml: No such file"):
        load_catalogue(catalogue)


def test_a_typed_function_is_a_tool(catalogue: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from treadle.agent_loop import function_tool\n"
        "async def add(a: int, b: int) -> str:\n"
        '    """Adds two numbers.\n\n    Args:\n        a: One.\n        b: Other.\n    """\n'
        "    return str(a + b)\n"
        "double = function_tool(add)\n"
    )
    catalogue.write_text(f"tools: [{{function: '{tmp_path}/mine.py:add'}}]\n")
    (tool,) = load_catalogue(catalogue).values()
    assert (tool.spec.name, tool.spec.parameters["required"]) == ("add", ["a", "b"])
    catalogue.write_text(f"tools: [{{function: '{tmp_path}/mine.py:double'}}]\n")
    assert list(load_catalogue(catalogue)) == ["add"]


def test_all_function_tools_of_a_file_are_tools(tmp_path: Path) -> None:
    head = "from treadle.agent_loop import function_tool\n"
    function = (
        "@function_tool\nasync def {0}(a: int) -> str:\n"
        '    """Does {0}.\n\n    Args:\n        a: One.\n    """\n    return "{0}"\n'
    )
    mine = tmp_path / "mine.py"
    mine.write_text(head + function.format("two") + function.format("one") + "again = two\n")
    assert list(load_catalogue(mine)) == ["two", "one"]
    for text, said in (
        ("def one() -> str: ...\n", "has no tool: write `@function_tool`"),
        (head + function.format("one") + "other = one\n" + function.format("one"), "already is a"),
        ("from verl.tools.function_tool import function_tool\n", "here it is `from treadle"),
    ):
        other = tmp_path / f"m{len(text)}.py"
        other.write_text(text)
        with pytest.raises(SetupError, match=said):
            load_catalogue(other)


def test_a_file_is_run_once_and_files_of_one_name_are_two(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"here = ['{folder}']\nalso = here\n")
    mine = load_import_path(f"{tmp_path}/a/mine.py:here", "tool")
    assert load_import_path(f"{tmp_path}/a/mine.py:also", "reward") is mine
    assert load_import_path(f"{tmp_path}/a/../b/mine.py:here", "tool") == ["b"]
    assert mine == ["a"]


def test_what_a_users_module_raises_is_told_with_its_place(
    tmp_path: Path, catalogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "treadle_broken_tool.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    catalogue.write_text("tools:\n  - class_name: treadle_broken_tool.Tool\n")
    with pytest.raises(SetupError, match=r"tools\[0\]: cannot import .*: ZeroDivisionError"):
        load_catalogue(catalogue)


def test_a_missing_library_is_told_at_start(
    catalogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    catalogue.write_text(MCP + SERVERS)
    with pytest.raises(SetupError, match=r"tools\[0\] needs mcp, .*'treadle-tools\[mcp\]'"):
        load_catalogue(catalogue)
    catalogue.write_text("tools: [{class_name: verl.tools.geo3k_tool.Geo3kTool}]")
    with pytest.raises(SetupError, match=r"needs math_verify, .*'treadle-tools\[math\]'"):
        load_catalogue(catalogue)


@pytest.mark.asyncio
async def test_a_plain_function_that_holds_the_interpreters_lock_can_be_ended(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import re\n"
        "from treadle.agent_loop import ToolFailure, ToolResult, function_tool\n"
        "@function_tool\n"
        "def match(text: str) -> ToolResult:\n"
        "    'Matches.'\n"
        "    if text == 'wrong': raise ToolFailure('no letters')\n"
        "    if text == 'broken': {}[text]\n"
        "    return ToolResult(content=str(bool(re.match('(a+)+$', text))), reward=0.5)\n"
    )
    tool = load_catalogue(mine)["match"]
    assert isinstance(tool, FunctionTool)
    assert await tool.call({"text": "aaa"}) == ToolResult(content="True", reward=0.5)
    with pytest.raises(ToolFailure, match="no letters"):
        await tool.call({"text": "wrong"})
    with pytest.raises(ToolError, match=r"tool 'match': KeyError: 'broken' \(.*mine.py:7, in"):
        await tool.call({"text": "broken"})
    call = asyncio.create_task(tool.call({"text": "a" * 40 + "b"}))
    await asyncio.sleep(0)  # it takes the process, and the next call starts another one
    assert await tool.call({"text": "aaab"}) == ToolResult(content="False", reward=0.5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await call
    assert re.search(r"tool 'match': it was at .*mine.py:8, in match", cancelled.value.__notes__[0])


def test_references_are_resolved_as_in_a_configuration(
    catalogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_TEST", "Compute with")
    place = "tools[0].tool_schema.function"
    text = f'"${{oc.env:TREADLE_TEST}} ${{.name}} or ${{{place}.name}}."'
    catalogue.write_text(CALCULATOR + SCHEMA.replace("Compute.", text))
    assert load_catalogue(catalogue)["calc"].spec.description == "Compute with calc or calc."
    catalogue.write_text(CALCULATOR + SCHEMA.replace("Compute.", "${.nme}"))
    where = r"tools\.0\.tool_schema\.function"
    with pytest.raises(SetupError, match=rf"{where}\.description: .*no key {where}\.nme"):
        load_catalogue(catalogue)
