import asyncio
from collections.abc import Mapping

import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SetupError,
    Toolbox,
    ToolCall,
    ToolError,
    ToolResult,
    check_metric_rules,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedTool
from treadle.tracing import Metric, Reduce

_TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="x",
    messages=(Message(role="user", content="?"),),
)


class _Reporter:
    def __init__(self, **rules: Reduce) -> None:
        self.metric_rules: Mapping[str, Reduce] = {f"it/{name}": r for name, r in rules.items()}


def test_one_name_has_one_rule() -> None:
    check_metric_rules({"a": _Reporter(n=Reduce.SUM), "b": _Reporter(n=Reduce.SUM), "c": object()})
    with pytest.raises(SetupError, match=r"'it/n' is combined by SUM as tool 'a' .* by MEAN as b"):
        check_metric_rules({"tool 'a'": _Reporter(n=Reduce.SUM), "b": _Reporter(n=Reduce.MEAN)})


def test_the_names_of_the_loop_are_taken() -> None:
    own = _Reporter()
    own.metric_rules = {"tool/calls": Reduce.MEAN}
    with pytest.raises(
        SetupError, match="'tool/calls' is combined by SUM as the agent loop itself"
    ):
        check_metric_rules({"a": own})


def test_a_tool_that_does_not_say_it_is_told_at_its_first_result() -> None:
    def reports(rule: Reduce) -> ScriptedTool:
        return ScriptedTool(results=[ToolResult(content="", metrics=(Metric("n", 1.0, rule),))])

    tools = {"first": reports(Reduce.SUM), "second": reports(Reduce.MAX)}

    async def run() -> None:
        async with Toolbox(
            _TASK, tools, LoopLimits(max_response_tokens=9), codec=ByteRenderer()
        ) as toolbox:
            for name in tools:
                await toolbox.run([ToolCall(id="c", name=name, arguments={})])

    with pytest.raises(ToolError, match=r"'second': .*'n' as MAX, .* is SUM") as raised:
        asyncio.run(run())
    assert raised.value.tool == "second"
