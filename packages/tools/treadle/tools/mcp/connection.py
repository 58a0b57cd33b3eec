"""Connections to one MCP server: one per trajectory, shared by the server's tools.

Invariant: a connection is opened by the first tool of a trajectory that needs it and closed by the
last one that leaves it; so what the server keeps for a connection (a browser, a shell) is that
trajectory's own, and ends with it. Over stdio that is one process per trajectory.

Each connection lives in its own task, since the SDK wants it left where it was entered. Tools
wait for the handshake and for the answers to their calls; `close` wakes the connection's task and
waits for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from mcp import Client
from mcp.types import CallToolResult

from treadle.agent_loop import AgentTask
from treadle.tools.mcp.servers import ServerConfig, innermost
from treadle.tracing import traced


class Connections:
    """The open connections to one server.

    Args:
        name: Name of the server, for errors.
    """

    def __init__(self, name: str, config: ServerConfig) -> None:
        self.name = name
        self.config = config
        self._open: dict[int, Connection] = {}

    async def join(self, task: AgentTask) -> Connection:
        """Returns the trajectory's connection, open; each `join` is ended by one `leave`.

        Raises:
            ConnectionError: The server cannot be reached.
        """
        connection = self._open.get(id(task))
        if connection is None:
            connection = self._open[id(task)] = Connection(self.name, self.config, task)
        connection.users += 1
        try:
            await connection.opened()
        except BaseException:
            await self.leave(connection)
            raise
        return connection

    async def leave(self, connection: Connection) -> None:
        """Closes the connection if no other tool uses it."""
        connection.users -= 1
        if connection.users == 0:
            del self._open[id(connection.task)]
            await connection.close()


class Connection:
    """One trajectory's connection.

    Args:
        task: The trajectory's; held, so that its identity stays its own.
    """

    def __init__(self, name: str, config: ServerConfig, task: AgentTask) -> None:
        self.task = task
        self.users = 0
        self._name = name
        self._config = config
        self._client: Client | None = None
        self._failure: Exception | None = None
        self._settled = asyncio.Event()
        self._closing = asyncio.Event()
        self._life = asyncio.create_task(self._live(), name=f"MCP server {name}")

    async def opened(self) -> Client:
        """Waits for the handshake.

        Raises:
            ConnectionError: It failed, or the connection broke since.
        """
        await self._settled.wait()
        if self._client is None or self._failure is not None:
            assert self._failure is not None, "a connection that never opened has failed"
            raise ConnectionError(
                f"the MCP server {self._name!r} cannot be reached: {innermost(self._failure)}"
            ) from self._failure
        return self._client

    @traced
    async def call(self, name: str, arguments: Mapping[str, object]) -> CallToolResult:
        """Calls a tool and waits for its answer."""
        client = await self.opened()
        return await client.call_tool(name, dict(arguments))

    async def close(self) -> None:
        """Ends the connection, and with it a server's process."""
        self._closing.set()
        if not self._settled.is_set():  # a handshake, which may take long
            self._life.cancel()
        await asyncio.wait([self._life])

    async def _live(self) -> None:
        try:
            async with self._config.connect() as client:
                self._client = client
                self._settled.set()
                await self._closing.wait()
        except Exception as error:  # a border: the SDK raises whatever its transports do
            self._failure = error
        finally:
            self._settled.set()
