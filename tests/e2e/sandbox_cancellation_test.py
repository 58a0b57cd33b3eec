"""Cancelling a trajectory reaches through tool, HTTP and server to the processes in the sandbox."""

import asyncio
import json
import os
import select

import httpx
import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    ToolAgentLoop,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.rollout_server.testing.descendants import descendants
from treadle.tools.code_interpreter import CodeInterpreterTool
from treadle.tools.sandbox.testing import server_process, why_no_user_namespaces

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(why_no_user_namespaces() is not None, reason=str(why_no_user_namespaces())),
]

LONG_S = 300  # Which outlasts the test's own time limit.
FOREVER = f"import os, time\nfor _ in range(2):\n    os.fork()\ntime.sleep({LONG_S})"


def call(code: str) -> str:
    request = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    return f"<tool_call>\n{request}\n</tool_call>"


def attempt(index: int) -> AgentTask:
    return AgentTask(
        task_id="train/0",
        sample_index=0,
        rollout_index=index,
        loop="tool_agent",
        messages=(Message(role="user", content="Wait."),),
    )


def services(tool: CodeInterpreterTool, *replies: str) -> Services:
    return Services(
        generator=ScriptedGenerator(replies),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=4000, tool_timeout_s=LONG_S),
        sampling=SamplingParams(max_tokens=1000),
        tools={tool.spec.name: tool},
    )


async def running(client: httpx.AsyncClient, wanted: int) -> None:
    while (await client.get("/v1/stats")).json()["running"] != wanted:
        pass


@pytest.mark.asyncio
async def test_a_trajectory_that_is_cancelled_in_a_tool_ends_it_and_frees_its_slot() -> None:
    async with (
        server_process("--places", "1", "--warm", "0", "--packages", "") as (url, server),
        httpx.AsyncClient(base_url=url.removesuffix("/run_code"), timeout=30) as client,
    ):
        config = {"sandbox_fusion_url": url, "default_timeout": LONG_S, "rate_limit": 1}
        tool = CodeInterpreterTool(config=config)
        before = descendants(server.pid)
        stuck = asyncio.create_task(
            ToolAgentLoop().run(attempt(0), services(tool, call(FOREVER), "unused"))
        )
        await running(client, 1)
        # bubblewrap and the supervisor, the program and what it forked: all are there to be ended.
        while len(began := descendants(server.pid) - before) < 6:
            await client.get("/v1/stats")
        processes = [os.pidfd_open(pid) for pid in began]
        next_one = asyncio.create_task(
            ToolAgentLoop().run(attempt(1), services(tool, call("print(6*7)"), "#### 42"))
        )
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        await running(client, 0)
        for process in processes:
            select.select([process], [], [])
            os.close(process)
        trajectory = await next_one
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["42\n"]
