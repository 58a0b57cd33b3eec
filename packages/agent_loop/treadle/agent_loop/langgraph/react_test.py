"""Pinned semantics of the ReAct loop: those of `tool_agent`, through a graph."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_core.tools import ToolException, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from treadle.agent_loop import (
    AgentTask,
    Drop,
    LoopError,
    LoopLimits,
    LoopRegistry,
    Message,
    RolloutRunner,
    SamplingParams,
    Services,
    SetupError,
    StopReason,
    ToolAgentLoop,
    ToolError,
    ToolFailure,
    ToolResult,
    Trajectory,
    TrajectoryTimeoutError,
)
from treadle.agent_loop.langgraph import Agent, ReactAgentLoop
from treadle.agent_loop.langgraph.agent import NewMessages
from treadle.agent_loop.langgraph.react import Graph
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator, ScriptedTool
from treadle.agent_loop.testing.byte_renderer import decode
from treadle.agent_loop.testing.fake_clock import let_pass
from treadle.agent_loop.testing.scripted import Reply

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": 1}}\n</tool_call>'
TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="react_agent",
    messages=(Message(role="system", content="sys"), Message(role="user", content="hi")),
)


def services(
    replies: Sequence[Reply], *tools: ScriptedTool, sampling_max: int = 1000, **limits: object
) -> tuple[Services, ScriptedGenerator]:
    generator = ScriptedGenerator(replies)
    return (
        Services(
            generator=generator,
            renderer=ByteRenderer(),
            limits=replace(LoopLimits(max_response_tokens=10_000), **limits),  # type: ignore[arg-type]
            sampling=SamplingParams(max_tokens=sampling_max, seed=1),
            tools={tool.spec.name: tool for tool in tools},
        ),
        generator,
    )


def answers(trajectory: Trajectory) -> list[str]:
    return [m.content for m in trajectory.messages if m.role == "tool"]


def metric(trajectory: Trajectory, name: str) -> float:
    return sum(m.value for m in trajectory.metrics if m.name == name)


@pytest.mark.asyncio
async def test_a_call_is_answered_and_the_model_ends() -> None:
    lookup = ScriptedTool(results=[ToolResult(content="42", reward=0.5)])
    kit, generator = services([CALL, "It is 42."], lookup)
    trajectory = await ReactAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.FINISHED
    roles = [message.role for message in trajectory.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.final_text == "It is 42."
    assert trajectory.num_turns == 4
    assert trajectory.tool_rewards == (0.5,)
    assert [lookup.calls, lookup.num_opened, lookup.num_closed] == [[{"key": 1}], 1, 1]
    text = decode(trajectory.tokens.response_ids)
    assert text == f"{CALL}<end><tool>42<end><assistant>It is 42.<end>"
    assert metric(trajectory, "tool/calls") == 1
    assert metric(trajectory, "capture/exact") == 1
    (session,) = {r.context.session_id for r in generator.requests}
    assert generator.finished_sessions == [session]


pieces = st.sampled_from(
    [CALL, CALL * 2, "text", "", "<tool_call>{oops}</tool_call>", CALL.replace("lookup", "nope")]
)
results = st.text("ab", max_size=40).map(lambda text: ToolResult(content=text, reward=len(text)))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(pieces, max_size=3).map("".join), min_size=12, max_size=12),
    st.lists(
        results
        | st.just(ToolResult(content="enough", stop=True))
        | st.builds(ToolFailure, st.text("xy", max_size=5)),
        min_size=40,
        max_size=40,
    ),
    st.integers(1, 400),
    st.integers(200, 700) | st.none(),
    st.integers(1, 150),
    st.integers(1, 6) | st.none(),
    st.integers(1, 6) | st.none(),
    st.integers(1, 3),
)
@example(
    replies=[CALL * 2] + [""] * 11,  # a limit is reached, so neither call runs or is over the cap
    results=[ToolResult(content="")] * 40,
    max_response=81,
    max_context=250,
    max_tokens=81,
    max_assistant=None,
    max_user=None,
    max_parallel=1,
)
def test_the_trajectory_is_that_of_the_tool_loop(
    replies: list[str],
    results: list[ToolResult | ToolFailure],
    max_response: int,
    max_context: int | None,
    max_tokens: int,
    max_assistant: int | None,
    max_user: int | None,
    max_parallel: int,
) -> None:
    """For any script and any limits: tokens, order of checks, texts, rewards and counts."""

    def run(loop: ToolAgentLoop | ReactAgentLoop) -> tuple[Trajectory, ScriptedTool, object]:
        lookup = ScriptedTool(results=results)
        kit, generator = services(
            replies,
            lookup,
            sampling_max=max_tokens,
            max_response_tokens=max_response,
            max_context_tokens=max_context,
            max_assistant_turns=max_assistant or 12,
            max_user_turns=max_user,
            max_parallel_calls=max_parallel,
        )
        trajectory = asyncio.run(loop.run(TASK, kit))
        return trajectory, lookup, [(r.prompt, r.params) for r in generator.requests]

    expected, expected_tool, expected_requests = run(ToolAgentLoop())
    trajectory, lookup, requests = run(ReactAgentLoop())
    assert requests == expected_requests
    assert trajectory.samples == expected.samples
    assert trajectory.stop is expected.stop
    assert trajectory.num_turns == expected.num_turns
    assert trajectory.tool_rewards == expected.tool_rewards
    assert answers(trajectory) == answers(expected)
    assert [m.content for m in trajectory.messages] == [m.content for m in expected.messages]
    assert lookup.calls == expected_tool.calls
    assert (lookup.num_opened, lookup.num_closed) == (
        expected_tool.num_opened,
        expected_tool.num_closed,
    )
    for name in ("calls", "unknown", "failures", "over_cap", "parse_errors"):
        assert metric(trajectory, f"tool/{name}") == metric(expected, f"tool/{name}"), name


@tool
async def double(number: int) -> int:
    """Double a number."""
    if number > 100:
        raise ToolException("too large")
    return 2 * number


@tool(response_format="content_and_artifact")
async def submit(answer: str) -> tuple[str, ToolResult]:
    """Submit an answer."""
    return "", ToolResult(content="thanks", reward=1.0, stop=True)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Doubling(ReactAgentLoop):
    tools = (double, submit)


@pytest.mark.asyncio
async def test_langchain_tools_and_the_runs_own_stand_side_by_side() -> None:
    replies = [
        call("double", '{"number": 21}'),
        CALL,
        call("double", '{"number": "x"}'),
        call("double", '{"number": 101}'),
        call("submit", '{"answer": "42"}'),
    ]
    kit, generator = services(replies, ScriptedTool(results=["a key"]))
    trajectory = await Doubling().run(TASK, kit)
    assert answers(trajectory) == [
        "42",
        "a key",
        "Error executing tool 'double': argument number: Input should be a valid integer, unable "
        "to parse string as an integer",
        "Error executing tool 'double': too large",
    ]
    assert trajectory.stop is StopReason.TOOL_STOP
    assert trajectory.tool_rewards == (0.0, 0.0, 0.0, 0.0, 1.0)
    prompt = decode(generator.requests[0].prompt)
    assert '"name": "double", "description": "Double a number.", "parameters": {"prop' in prompt


@pytest.mark.asyncio
async def test_a_row_selects_among_both_kinds_of_tools() -> None:
    task = replace(TASK, fields={"extra_info": {"tool_selection": ["double"]}})
    kit, _ = services([call("submit", '{"answer": "1"}'), "oh"], ScriptedTool())
    trajectory = await Doubling().run(task, kit)
    assert answers(trajectory) == ["Unknown function 'submit'. Available tools: ['double']"]


@pytest.mark.asyncio
async def test_a_name_that_is_taken_is_refused() -> None:
    kit, _ = services([], ScriptedTool("double"))
    with pytest.raises(SetupError, match=r"\['double'\] are both LangChain tools of Doubling and"):
        await Doubling().run(TASK, kit)


def graph_of_their_own(agent: Agent) -> Graph:
    """Written without any knowledge of this package."""
    model = agent.model.bind_tools(agent.tools)

    async def ask(state: MessagesState) -> NewMessages:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(list(agent.tools)))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    return graph.compile()


@pytest.mark.asyncio
async def test_langgraphs_tool_node_runs_tools_in_the_toolbox() -> None:
    lookup = ScriptedTool(
        results=["a" * 99, ToolResult(content="b", reward=2.0), ToolResult(content="c", stop=True)]
    )
    kit, _ = services([CALL * 3, CALL], lookup, max_parallel_calls=2, max_tool_response_chars=4)
    trajectory = await ReactAgentLoop(graph_of_their_own).run(TASK, kit)
    assert answers(trajectory) == ["aa...(truncated)...aa", "b"]
    assert trajectory.stop is StopReason.TOOL_STOP
    assert trajectory.tool_rewards == (0.0, 2.0, 0.0)
    assert (lookup.num_opened, lookup.num_closed) == (1, 1)
    assert metric(trajectory, "tool/over_cap") == 1
    assert metric(trajectory, "capture/exact") == 1


@pytest.mark.asyncio
async def test_a_graph_of_their_own_keeps_to_the_limits() -> None:
    kit, _ = services(
        [CALL] * 3, ScriptedTool(results=["a"] * 3), max_assistant_turns=3, max_user_turns=9
    )
    trajectory = await ReactAgentLoop(graph_of_their_own).run(TASK, kit)
    assert trajectory.stop is StopReason.ASSISTANT_TURNS
    assert (trajectory.assistant_turns, trajectory.user_turns) == (3, 2)


@pytest.mark.asyncio
async def test_a_graph_that_edits_its_history_trains_each_sampled_token_once() -> None:
    def forgetful(agent: Agent) -> Graph:
        async def draft(state: MessagesState) -> NewMessages:
            return {"messages": [await agent.model.ainvoke(state["messages"])]}

        async def forget(state: MessagesState) -> NewMessages:
            drafted = state["messages"][-1]
            asked = HumanMessage("Again.")
            return {"messages": [RemoveMessage(id=drafted.id or ""), asked]}

        graph = StateGraph(MessagesState)
        for name, node in (("draft", draft), ("forget", forget), ("final", draft)):
            graph.add_node(name, node)
        graph.add_edge(START, "draft")
        graph.add_edge("draft", "forget")
        graph.add_edge("forget", "final")
        graph.add_edge("final", END)
        return graph.compile()

    kit, _ = services(["first", "second"])
    trajectory = await ReactAgentLoop(forgetful, steps_per_turn=3).run(TASK, kit)
    trained = [
        decode([i for i, sampled in zip(s.ids, s.loss_mask, strict=True) if sampled])
        for s in trajectory.samples
    ]
    assert trained == ["first<end>", "second<end>"]
    assert [m.content for m in trajectory.messages] == ["sys", "hi", "Again.", "second"]


@pytest.mark.asyncio
async def test_an_answer_that_the_graph_rewrote_is_no_longer_what_was_sampled() -> None:
    def editing(agent: Agent) -> Graph:
        async def twice(state: MessagesState) -> NewMessages:
            said = await agent.model.ainvoke(state["messages"])
            changed = AIMessage(f"{said.content}!", id=said.id)
            asked = HumanMessage("Sure?")
            last = await agent.model.ainvoke([*state["messages"], changed, asked])
            return {"messages": [changed, asked, last]}

        graph = StateGraph(MessagesState)
        graph.add_node("twice", twice)
        graph.add_edge(START, "twice")
        graph.add_edge("twice", END)
        return graph.compile()

    kit, _ = services(["yes", "sure"])
    trajectory = await ReactAgentLoop(editing).run(TASK, kit)
    assert [decode(s.response_ids) for s in trajectory.samples] == ["yes<end>", "sure<end>"]
    assert "yes!" in decode(trajectory.tokens.prompt_ids)


@pytest.mark.asyncio
async def test_a_graph_without_an_end_is_stopped_and_told_how_to_go_on() -> None:
    def circling(agent: Agent) -> Graph:
        async def node(state: MessagesState) -> NewMessages:
            return {"messages": []}

        graph = StateGraph(MessagesState)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        graph.add_edge("node", "node")
        return graph.compile()

    kit, _ = services([], max_assistant_turns=2)
    with pytest.raises(LoopError, match=r"task 't' took more than 5 steps .* turns have more than"):
        await ReactAgentLoop(circling).run(TASK, kit)


def test_the_recursion_limit_allows_what_the_limits_allow() -> None:
    limits = LoopLimits(max_response_tokens=50)
    assert ReactAgentLoop().recursion_limit(limits) == 101
    assert ReactAgentLoop(steps_per_turn=5).recursion_limit(limits) == 251
    assert ReactAgentLoop().recursion_limit(replace(limits, max_assistant_turns=4)) == 9
    assert ReactAgentLoop().recursion_limit(replace(limits, max_user_turns=2)) == 7
    with pytest.raises(ValueError, match="steps_per_turn is 0"):
        ReactAgentLoop(steps_per_turn=0)


@pytest.mark.asyncio
async def test_a_broken_tool_fails_the_attempt_and_is_closed() -> None:
    lookup = ScriptedTool(results=[ConnectionError("sandbox is down")])
    kit, generator = services([CALL], lookup)
    with pytest.raises(ToolError, match="tool 'lookup': ConnectionError: sandbox is down"):
        await ReactAgentLoop().run(TASK, kit)
    assert lookup.num_closed == 1
    assert len(generator.finished_sessions) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("graph", [None, graph_of_their_own])
async def test_cancellation_reaches_the_tools(graph: object) -> None:
    lookup = ScriptedTool(results=[asyncio.Event()])
    kit, generator = services([CALL], lookup)
    run = asyncio.create_task(ReactAgentLoop(graph).run(TASK, kit))  # type: ignore[arg-type]
    await lookup.until_called(1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert lookup.num_closed == 1
    assert len(generator.finished_sessions) == 1


@pytest.mark.asyncio
async def test_the_watchdog_is_told_what_the_trajectory_waits_for() -> None:
    lookup = ScriptedTool(results=[asyncio.Event()])
    kit, generator = services([CALL], lookup)
    run = asyncio.create_task(ReactAgentLoop().run(TASK, kit))
    await lookup.until_called(1)
    (session,) = {r.context.session_id for r in generator.requests}
    assert kit.pulse.last_event == f"waiting for tools: ['lookup'] in session {session}"
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


@pytest.mark.asyncio
async def test_cancellation_reaches_a_langchain_tool() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    kit, _ = services([call("wait", "{}")])
    run = asyncio.create_task(ReactAgentLoop(tools=[wait]).run(TASK, kit))
    await began.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ended.is_set()


@pytest.mark.asyncio
async def test_a_deadline_reaches_the_tools_and_the_runner_counts_it() -> None:
    lookup = ScriptedTool(results=[asyncio.Event()])
    kit, generator = services([CALL], lookup)
    done: list[Trajectory] = []

    async def sink(trajectory: Trajectory) -> None:
        done.append(trajectory)

    runner = RolloutRunner(
        LoopRegistry({"react_agent": ReactAgentLoop()}),
        kit,
        max_in_flight=1,
        deadline_s=60.0,
        failure_policy=Drop(),
    )
    running = asyncio.create_task(runner.run([TASK], sink))
    await lookup.until_called(1)
    let_pass(60.0)
    assert (await running).num_failed == 1
    assert isinstance(done[0].error, TrajectoryTimeoutError)
    assert (lookup.num_opened, lookup.num_closed) == (1, 1)
    assert len(generator.finished_sessions) == 1
