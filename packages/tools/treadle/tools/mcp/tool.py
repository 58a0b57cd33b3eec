"""Adapts a tool of an MCP server to ours.

Invariant: the model is shown answers with `isError` and errors about its arguments; a server that
dies or breaks the protocol fails the trajectory. Nothing is dropped from an answer silently:
content that a model cannot be shown is named in its place.

A call waits for a free place (`rate_limit` of the catalogue entry), then for the answer; the loop
bounds both by its tool time limit.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass

from mcp import MCPError
from mcp.types import (
    INVALID_PARAMS,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)

from treadle.agent_loop import (
    IMAGE_MARK,
    AgentTask,
    Image,
    ToolFailure,
    ToolResult,
    ToolSpec,
)
from treadle.agent_loop.turning_limit import TurningLimit
from treadle.tools.mcp.connection import Connection, Connections


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """One tool of a server.

    Attributes:
        spec: The server's description of the tool.
        places: Calls that run at a time; shared by the tools of one catalogue entry.
        timeout_s: Seconds for one answer. None: the loop's tool time limit.
    """

    spec: ToolSpec
    connections: Connections
    places: asyncio.Semaphore
    timeout_s: float | None = None

    async def open(self, task: AgentTask) -> McpSession:
        """Connects, unless another tool of the server has for this trajectory.

        Raises:
            ConnectionError: The server cannot be reached.
        """
        return McpSession(tool=self, connection=await self.connections.join(task))


@dataclass(frozen=True, slots=True, kw_only=True)
class McpSession:
    """A trajectory's use of one tool."""

    tool: McpTool
    connection: Connection

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Runs one call; text and images of its answer are what the model sees.

        Raises:
            ToolFailure: The tool reports an error or does not answer in time, or the server
                refuses the arguments.
        """
        limit = TurningLimit(self.tool.timeout_s)
        async with self.tool.places:
            try:
                async with limit:
                    result = await self.connection.call(self.tool.spec.name, arguments)
            except TimeoutError as error:
                if not limit.expired:
                    raise
                raise ToolFailure(f"it did not end within {self.tool.timeout_s:g} s") from error
            except MCPError as error:
                if error.code == INVALID_PARAMS:
                    raise ToolFailure(error.error.message) from error
                raise
        text, images = _read(result)
        if result.is_error:
            raise ToolFailure(text, images=images)
        return ToolResult(content=text, images=images)

    async def aclose(self) -> None:
        """Leaves the connection to the trajectory's other tools, or closes it."""
        await self.tool.connections.leave(self.connection)


def _read(result: CallToolResult) -> tuple[str, tuple[Image, ...]]:
    """Returns the text and the images of an answer."""
    texts: list[str] = []
    images: list[Image] = []
    for block in result.content:
        match block:
            case TextContent(text=text):
                texts.append(text)
            case EmbeddedResource(resource=TextResourceContents(text=text)):
                texts.append(text)
            case ImageContent(data=data, mime_type=mime):
                try:
                    images.append(Image(data=base64.b64decode(data), mime=mime))
                except ValueError as error:
                    texts.append(f"[image content, which cannot be shown: {error}]")
            case _:
                texts.append(f"[{block.type} content, which cannot be shown]")
    if not texts and not images and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(texts)
    # In a server's text the marker does not stand for an image.
    return (text.replace(IMAGE_MARK, " ") if images else text), tuple(images)
