"""A harness of verifiers that chats in this process, in place of one process per rollout.

Invariant: every model call goes to the rollout's interception server, as verifiers asks of a
harness; so its traces, stops and rewards are those of its own `null` harness. Tools are those of
the environment's MCP servers; the model cannot run commands.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

import httpx
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

LIMIT_CODES: Final = ("context_length_exceeded", "turn_limit_reached")
"""The codes of the endpoint's errors beyond the run's limits."""

HARNESS_ID: Final = "treadle_chat"
"""The name by which verifiers finds this harness: it imports a module of that name."""

# verifiers imports harnesses by a name without dots.
sys.modules.setdefault(HARNESS_ID, sys.modules[__name__])

__all__ = ["ChatHarness", "ChatHarnessConfig"]

_DONE: Final = ProgramResult(exit_code=0, stdout="", stderr="")


class ChatHarnessConfig(HarnessConfig):
    """Takes no settings."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Calls the model, and the tools that it asks for, until it answers without a call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Runs one conversation; see `Harness.launch`."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        specs = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_mcp({"mcpServers": specs}, stack)
            client = await stack.enter_async_context(
                # To this machine, in plain text: no certificates to load, no limit of its own.
                httpx.AsyncClient(timeout=None, verify=False, trust_env=False)
            )
            while True:
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json=body | ({"tools": tools} if tools else {}),
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if answer.status_code != httpx.codes.OK:
                    ended = any(code in answer.text for code in LIMIT_CODES)
                    return _DONE if ended else ProgramResult(1, "", answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append({k: v for k, v in message.items() if v is not None})
                if not message.get("tool_calls"):
                    return _DONE
                for call in message["tool_calls"]:
                    content = await _call(servers, dispatch, call["function"])
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )


async def _call(servers: Any, dispatch: Mapping[str, Any], function: Mapping[str, str]) -> Any:
    name = function["name"]
    if name not in dispatch:
        return f"there is no tool {name!r}; there are: {', '.join(dispatch) or 'none'}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "the arguments must be a JSON object"
    return await call_mcp(servers, dict(dispatch), name, arguments)
