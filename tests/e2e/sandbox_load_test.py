"""Many executions at once, through the tool and a real server: each gets its own answer."""

import asyncio

import pytest

from treadle.agent_loop import AgentTask, Message, ToolSession
from treadle.tools.code_interpreter import CodeInterpreterTool
from treadle.tools.sandbox.testing import server_process, why_no_user_namespaces
from treadle.tracing import aggregate

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(why_no_user_namespaces() is not None, reason=str(why_no_user_namespaces())),
]
CALLS = 64
TASK = AgentTask(
    task_id="train/0",
    sample_index=0,
    rollout_index=0,
    loop="tool_agent",
    messages=(Message(role="user", content="Compute."),),
)


@pytest.mark.asyncio
async def test_none_of_many_executions_is_lost_though_the_queue_is_short() -> None:
    async with server_process("--queue", "8", "--warm", "0", "--packages", "") as (url, _):
        # Two tools like two workers: together they send more than the server lets wait.
        tools = [
            CodeInterpreterTool(config={"sandbox_fusion_url": url, "num_workers": 6})
            for _ in range(2)
        ]
        sessions: list[ToolSession] = [await tool.open(TASK) for tool in tools]

        async def compute(number: int) -> str:
            session = sessions[number % 2]
            result = await session.call({"code": f"print({number} ** 2)"})
            metrics.append(result.metrics)
            return result.content

        metrics: list[object] = []
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(compute(number)) for number in range(CALLS)]
        for session in sessions:
            await session.aclose()
    assert [answer.result() for answer in answers] == [f"{n**2}\n" for n in range(CALLS)]
    totals = aggregate(metrics)  # type: ignore[arg-type]
    assert totals["code_interpreter/timeouts"] == totals["code_interpreter/errors"] == 0
