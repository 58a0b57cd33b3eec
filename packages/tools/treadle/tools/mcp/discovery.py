"""Discovery: lists the tools of the configured MCP servers, once at start.

Invariant: a missing selected tool, a name that two servers use and a server that cannot be reached
or does not answer are errors at start. A refused connection is retried for 20 seconds, as in verl:
the server may be starting together with the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping, Sequence

import httpx2
from mcp import Client

from treadle.agent_loop import SetupError, ToolSpec
from treadle.agent_loop.errors import did_you_mean
from treadle.tools.mcp.connection import Connections
from treadle.tools.mcp.servers import ServerConfig, innermost
from treadle.tools.mcp.tool import McpTool

_ATTEMPTS, _WAIT_S = 10, 2.0
_ANSWER_S = 30.0


def discover(
    servers: Mapping[str, ServerConfig],
    *,
    selected: Collection[str] = (),
    rate_limit: int = 120,
    timeout_s: float | None = None,
) -> list[McpTool]:
    """Asks the servers for their tools, in a separate event loop.

    Args:
        selected: Tools to take. Empty: all.
        rate_limit: Calls of these tools that run at a time, in one process; at least 1.
        timeout_s: Seconds for one answer. None: the loop's tool time limit.

    Raises:
        SetupError: A server cannot be reached, two have a tool of one name, or none has a
            selected one.
    """
    found: dict[str, tuple[str, ToolSpec]] = {}
    for name, spec in _in_a_thread(servers):
        if spec.name in found:
            raise SetupError(
                f"the MCP servers {found[spec.name][0]!r} and {name!r} both have a tool "
                f"{spec.name!r}: leave one of them out"
            )
        found[spec.name] = name, spec
    for wanted in selected:
        if wanted not in found:
            raise SetupError(
                f"no MCP server has a tool {wanted!r}{did_you_mean(wanted, found)}; there are: "
                f"{', '.join(sorted(found)) or 'none'}"
            )
    places = asyncio.Semaphore(rate_limit)
    connections = {name: Connections(name, config) for name, config in servers.items()}
    return [
        McpTool(spec=spec, connections=connections[server], places=places, timeout_s=timeout_s)
        for server, spec in found.values()
        if not selected or spec.name in selected
    ]


def _in_a_thread(servers: Mapping[str, ServerConfig]) -> list[tuple[str, ToolSpec]]:
    """Runs in a separate thread without an event loop, as the caller may be inside one."""
    found: list[tuple[str, ToolSpec]] = []
    failures: list[SetupError] = []

    def run() -> None:
        try:
            found.extend(asyncio.run(_list_all(servers)))
        except SetupError as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="MCP discovery")
    thread.start()
    thread.join()
    for failure in failures:
        raise failure
    return found


async def _list_all(servers: Mapping[str, ServerConfig]) -> Sequence[tuple[str, ToolSpec]]:
    return [(name, spec) for name, config in servers.items() for spec in await _list(name, config)]


async def _list(name: str, config: ServerConfig) -> list[ToolSpec]:
    attempt = 1
    while True:
        try:
            async with config.connect() as client:
                async with asyncio.timeout(_ANSWER_S):
                    return await _specs(client)
        except Exception as error:  # a border: the SDK raises whatever its transports do
            cause = innermost(error)
            may_be_starting = isinstance(cause, httpx2.ConnectError)
            if attempt == _ATTEMPTS or not may_be_starting:
                raise SetupError(
                    f"the MCP server {name!r} cannot be reached ({attempt} attempts): "
                    f"{type(cause).__name__}: {cause}"
                ) from error
        attempt += 1
        await asyncio.sleep(_WAIT_S)


async def _specs(client: Client) -> list[ToolSpec]:
    specs: list[ToolSpec] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        specs.extend(
            ToolSpec(
                name=tool.name, description=tool.description or "", parameters=tool.input_schema
            )
            for tool in page.tools
        )
        cursor = page.next_cursor
        if cursor is None:
            return specs
