"""The MCP servers of a run: the `mcpServers` file, and how to reach each entry.

Invariant: a server that is started as a process gets only the variables that its entry names, and
the few that the SDK passes on (PATH, HOME, ...). What it prints to standard error is shown as inert
text. Unknown keys are errors.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from treadle.agent_loop import SetupError
from treadle.agent_loop.child_output import shown_output
from treadle.tracing.child_process import supervised

_CONNECT_S = 30.0
_GRACE_S = 1.0
"""From SIGTERM to SIGKILL; mcp's own is 2 s, after which the supervisor is killed."""


class ServerConfig(BaseModel):
    """One entry of `mcpServers`: a command to start, or the URL of a server that runs.

    Attributes:
        command: Started once per trajectory; it speaks the protocol over stdio.
        url: Address of a server that speaks streamable HTTP.
        auth_token: Sent as `Authorization: Bearer`; verl's key.
        type: The type in other programs' files; it follows from `command` or `url`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    cwd: Path | None = None
    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    auth_token: str | None = None
    type: Literal["stdio", "http", "streamable-http"] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> ServerConfig:
        if (self.command is None) is (self.url is None):
            raise ValueError("give either command (stdio) or url (HTTP)")
        if self.command is not None and (self.headers or self.auth_token):
            raise ValueError("headers and auth_token are for a url, not for a command")
        if self.url is not None and (self.args or self.env or self.cwd):
            raise ValueError("args, env and cwd are for a command, not for a url")
        return self

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """A connection; it must be left by the task that entered it.

        Raises:
            TimeoutError: The server did not answer the handshake in time.
        """
        limit = asyncio.timeout(_CONNECT_S)
        try:
            async with limit, self._client() as client:
                limit.reschedule(None)
                yield client
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"no handshake within {_CONNECT_S:g} s") from error

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        if self.command is not None:
            program = [self.command, *self.args]
            command, *arguments = supervised(
                program,
                environment={**os.environ, **self.env},
                directory=self.cwd,
                grace_s=_GRACE_S,
            )
            parameters = StdioServerParameters(
                command=command, args=arguments, env=self.env, cwd=self.cwd
            )
            # As a transport: of the parameters alone, mcp makes one from 2.3 on.
            async with (
                shown_output() as output,
                Client(stdio_client(parameters, errlog=TextIOWrapper(output))) as client,
            ):
                yield client
            return
        assert self.url is not None, "an entry has a command or a url"
        headers = dict(self.headers)
        if self.auth_token is not None:
            headers["Authorization"] = f"Bearer {self.auth_token}"
        # A call has no limit here: the loop bounds it by its own.
        timeout = httpx2.Timeout(_CONNECT_S, read=None)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            Client(streamable_http_client(self.url, http_client=http)) as client,
        ):
            yield client


def read_servers(path: Path) -> Mapping[str, ServerConfig]:
    """Reads the usual JSON file `{"mcpServers": {name: {command or url, ...}}}`.

    Raises:
        SetupError: The file cannot be read, or an entry is wrong; the message gives the place.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read the MCP servers {path}: {error.strerror}") from error
    except ValueError as error:
        raise SetupError(f"the MCP servers {path} are not JSON: {error}") from error
    entries = document.get("mcpServers") if isinstance(document, dict) else None
    if not isinstance(entries, dict) or not entries or set(document) != {"mcpServers"}:
        raise SetupError(f'{path} must hold {{"mcpServers": {{name: {{...}}}}}} and nothing else')
    servers = {}
    for name, entry in entries.items():
        try:
            servers[name] = ServerConfig.model_validate(entry)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("mcpServers", name, *first["loc"])))
            raise SetupError(f"{path}: {place}: {first['msg']}") from error
    return servers


def innermost(error: BaseException) -> BaseException:
    """Returns the first cause below the SDK's exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
