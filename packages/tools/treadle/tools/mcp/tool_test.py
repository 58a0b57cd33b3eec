"""MCP tools against real servers: a process over stdio, and uvicorn over a socket."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ImageContent, TextContent

from treadle.agent_loop import (
    AgentTask,
    Message,
    SetupError,
    Tool,
    ToolFailure,
    ToolResult,
    ToolSpec,
)
from treadle.tools import load_catalogue
from treadle.tools.mcp import McpTool, ServerConfig, discover, read_servers, servers
from treadle.tools.mcp import tool as tool_module
from treadle.tools.mcp.connection import Connections

SERVER = '''
import os
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("counter")
count = 0

@server.tool()
def add(amount: int) -> str:
    """Adds to the counter of this connection."""
    global count
    count += amount
    return str(count)

@server.tool()
def read() -> str:
    """Reads the counter and the process."""
    return f"{count} {os.getpid()}"

@server.tool()
def fail() -> str:
    """Fails."""
    raise ToolError("no such book")

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)

@server.tool()
def picture() -> list:
    """Shows a picture."""
    return ["a picture", Image(data=b"not really", format="png")]

server.run()
'''


def a_task(rollout: int = 0) -> AgentTask:
    question = Message(role="user", content="?")
    return AgentTask(
        task_id="row", sample_index=0, rollout_index=rollout, loop="x", messages=(question,)
    )


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    script = tmp_path_factory.mktemp("servers") / "counter.py"
    script.write_text(SERVER)
    return ServerConfig(command=sys.executable, args=(str(script),))


@pytest.fixture(scope="module")
def tools(counter: ServerConfig) -> dict[str, McpTool]:
    return {tool.spec.name: tool for tool in discover({"counter": counter})}


@pytest.mark.asyncio
async def test_a_trajectorys_tools_share_one_connection_and_others_do_not(
    tools: dict[str, McpTool],
) -> None:
    assert sorted(tools) == ["add", "die", "fail", "picture", "read"]
    assert tools["add"].spec.parameters["required"] == ["amount"]
    mine, other = a_task(0), a_task(1)
    add, read = await tools["add"].open(mine), await tools["read"].open(mine)
    elsewhere = await tools["read"].open(other)
    assert (await add.call({"amount": 2})).content == "2"
    assert (await add.call({"amount": 3})).content == "5"
    await add.aclose()
    count, process = (await read.call({})).content.split()
    untouched, another = (await elsewhere.call({})).content.split()
    assert (count, untouched) == ("5", "0")
    assert process != another
    await read.aclose()
    await elsewhere.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)


@pytest.mark.asyncio
async def test_a_connection_starts_anew_after_the_last_tool_left(
    tools: dict[str, McpTool],
) -> None:
    task = a_task()
    for _ in range(2):
        session = await tools["add"].open(task)
        assert (await session.call({"amount": 1})).content == "1"
        await session.aclose()


@pytest.mark.asyncio
async def test_what_a_tool_refuses_is_for_the_model(tools: dict[str, McpTool]) -> None:
    task = a_task()
    fail, add = await tools["fail"].open(task), await tools["add"].open(task)
    with pytest.raises(ToolFailure, match="no such book"):
        await fail.call({})
    with pytest.raises(ToolFailure, match="amount"):
        await add.call({"amount": "many"})
    await fail.aclose()
    await add.aclose()


@pytest.mark.asyncio
async def test_images_of_an_answer_are_kept(tools: dict[str, McpTool]) -> None:
    session = await tools["picture"].open(a_task())
    result = await session.call({})
    assert result.content == "a picture"
    assert [(image.data, image.mime) for image in result.images] == [(b"not really", "image/png")]
    await session.aclose()


@pytest.mark.asyncio
async def test_a_server_that_dies_is_not_the_models_fault(tools: dict[str, McpTool]) -> None:
    session = await tools["die"].open(a_task())
    with pytest.raises(Exception) as error:  # the SDK chooses the kind
        await session.call({})
    assert not isinstance(error.value, ToolFailure)
    await session.aclose()


def test_a_server_that_cannot_be_started_ends_the_start() -> None:
    broken = ServerConfig(command="/no/such/program")
    with pytest.raises(SetupError, match=r"'broken' cannot be reached \(1 attempts\)"):
        discover({"broken": broken})


SILENT = """
import os, sys
with open(sys.argv[1], "w") as pipe:
    pipe.write(str(os.getpid()))
sys.stdin.read()
"""


def a_silent_server(tmp_path: Path) -> tuple[McpTool, Path]:
    """A tool of a server that never answers the handshake, and a pipe that tells its process."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    config = ServerConfig(command=sys.executable, args=("-c", SILENT, str(pipe)))
    spec = ToolSpec(name="x", description="")
    connections = Connections("silent", config)
    return McpTool(spec=spec, connections=connections, places=asyncio.Semaphore(1)), pipe


@pytest.mark.asyncio
async def test_a_trajectory_that_ends_in_the_handshake_leaves_no_server(tmp_path: Path) -> None:
    tool, pipe = a_silent_server(tmp_path)
    task = a_task()
    opening, another = (asyncio.create_task(tool.open(task)) for _ in range(2))
    server = int(await asyncio.to_thread(pipe.read_text))
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    os.kill(server, 0)  # the other still waits for it
    another.cancel()
    ended, _ = await asyncio.wait([another], timeout=30)
    assert another in ended
    with pytest.raises(asyncio.CancelledError):
        await another
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


@pytest.mark.asyncio
async def test_a_server_that_never_answers_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_CONNECT_S", 0.1)
    tool, pipe = a_silent_server(tmp_path)
    # Its process may or may not have come as far as the pipe.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ConnectionError, match=r"'silent' cannot be reached: no handshake within"):
        await tool.open(a_task())
    with pytest.raises(SetupError, match=r"TimeoutError: no handshake within 0\.1 s"):
        await asyncio.to_thread(discover, {"silent": tool.connections.config})
    os.close(reader)


def test_what_a_model_cannot_be_shown_is_named() -> None:
    picture = ImageContent(type="image", data="aGVsbG8=", mime_type="image/svg+xml")
    text, images = tool_module._read(CallToolResult(content=[picture]))
    assert images == ()
    assert text.startswith("[image content, which cannot be shown: mime is 'image/svg+xml'")


def test_a_servers_text_says_nothing_about_where_its_images_belong() -> None:
    picture = ImageContent(type="image", data="aGVsbG8=", mime_type="image/png")
    page = TextContent(type="text", text="an <image> tag, <ima<image>ge>")
    text, images = tool_module._read(CallToolResult(content=[page, picture]))
    assert ToolResult(content=text, images=images).content == "an   tag, <ima ge>"
    assert tool_module._read(CallToolResult(content=[page]))[0] == page.text


def test_names_must_be_there_and_belong_to_one_server(counter: ServerConfig) -> None:
    with pytest.raises(SetupError, match="no MCP server has a tool 'ad', did you mean 'add'"):
        discover({"counter": counter}, selected=["ad"])
    with pytest.raises(SetupError, match="'one' and 'two' both have a tool"):
        discover({"one": counter, "two": counter})


def test_the_catalogue_takes_verls_entry(tmp_path: Path, counter: ServerConfig) -> None:
    servers_file = tmp_path / "servers.json"
    entry = {"command": counter.command, "args": list(counter.args)}
    servers_file.write_text(json.dumps({"mcpServers": {"counter": entry}}))
    catalogue = tmp_path / "tools.yaml"
    catalogue.write_text(
        "tools:\n"
        "  - class_name: verl.tools.mcp_base_tool.MCPBaseTool\n"
        "    config: {type: mcp, rate_limit: 120, timeout: 120}\n"
        f"    mcp: {{mcp_servers_config_path: {servers_file}, tool_selected_list: [read, add]}}\n"
    )
    tools: dict[str, Tool] = dict(load_catalogue(catalogue))
    assert sorted(tools) == ["add", "read"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "are not JSON"),
        ("{}", "must hold"),
        ('{"mcpServers": {"a": {}}}', "mcpServers.a: .*either command"),
        ('{"mcpServers": {"a": {"command": "x", "url": "y"}}}', "either command"),
        ('{"mcpServers": {"a": {"command": "x", "comand": "y"}}}', "mcpServers.a.comand: Extra"),
        ('{"mcpServers": {"a": {"url": "x", "env": {"A": "b"}}}}', "for a command, not for a url"),
        ('{"mcpServers": {"a": {"command": "x", "auth_token": "t"}}}', "are for a url"),
    ],
)
def test_mistakes_in_the_servers_file_are_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "servers.json"
    path.write_text(text)
    with pytest.raises(SetupError, match=why) as error:
        read_servers(path)
    assert str(path) in str(error.value)


@asynccontextmanager
async def over_http(server: MCPServer) -> AsyncIterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    app = server.streamable_http_app()
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    serving = asyncio.create_task(running.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        running.should_exit = True
        await serving


@pytest.mark.asyncio
async def test_a_server_over_http_and_its_time_limit() -> None:
    server = MCPServer("http")
    never = asyncio.Event()

    @server.tool()
    async def wait() -> str:
        """Never answers."""
        await never.wait()
        return ""

    @server.tool()
    async def greet(name: str) -> str:
        """Greets."""
        return f"Hello, {name}!"

    async with over_http(server) as url:
        config = ServerConfig(url=url, headers={"X-Team": "treadle"}, auth_token="secret")
        found = await asyncio.to_thread(discover, {"http": config}, timeout_s=60.0)
        assert [tool.timeout_s for tool in found] == [60.0, 60.0]
        tools = {tool.spec.name: tool for tool in found}
        soon = replace(tools["wait"], timeout_s=0.2)
        task = a_task()
        greeter, waiter = await tools["greet"].open(task), await soon.open(task)
        assert (await greeter.call({"name": "Ada"})).content == "Hello, Ada!"
        with pytest.raises(ToolFailure, match=r"it did not end within 0\.2 s"):
            await waiter.call({})
        assert (await greeter.call({"name": "Bob"})).content == "Hello, Bob!"
        await greeter.aclose()
        await waiter.aclose()


class Refusing:
    """A connection whose server answers with an error, and shows why."""

    async def call(self, name: str, arguments: Mapping[str, object]) -> CallToolResult:
        shown = ImageContent(type="image", data="cA==", mime_type="image/png")
        return CallToolResult(content=[TextContent(type="text", text="no"), shown], is_error=True)


@pytest.mark.asyncio
async def test_an_error_of_a_server_keeps_its_images() -> None:
    spec = ToolSpec(name="add", description="")
    tool = McpTool(spec=spec, connections=None, places=asyncio.Semaphore())  # type: ignore[arg-type]
    session = tool_module.McpSession(tool=tool, connection=Refusing())  # type: ignore[arg-type]
    with pytest.raises(ToolFailure, match="no") as failed:
        await session.call({})
    assert [image.data for image in failed.value.images] == [b"p"]
