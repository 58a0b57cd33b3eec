"""Tests of the loop registry and of the checks before a run."""

import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopRegistry,
    Message,
    SetupError,
    SingleTurnLoop,
    ToolAgentLoop,
    UnknownLoopError,
    choose_loop,
    default_loops,
)


def task(loop: str) -> AgentTask:
    return AgentTask(
        task_id="t",
        sample_index=0,
        rollout_index=0,
        loop=loop,
        messages=(Message(role="user", content="hi"),),
    )


def test_loops_are_found_by_name() -> None:
    loops = default_loops()
    assert loops.names == ("single_turn_agent", "tool_agent")
    assert isinstance(loops.resolve("tool_agent"), ToolAgentLoop)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UnknownLoopError, match=r"'tool' is not registered.*single_turn_agent, tool_"
    ):
        default_loops().resolve("tool")


def test_a_loop_can_be_named_in_full_and_is_made_once() -> None:
    loops = LoopRegistry({})
    name = "treadle.agent_loop.single_turn:SingleTurnLoop"
    assert isinstance(loops.resolve(name), SingleTurnLoop)
    assert loops.resolve(name) is loops.resolve(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no.such.module:Loop", "No module named 'no'"),
        ("treadle.agent_loop.single_turn:Nope", "no attribute 'Nope'"),
        ("treadle.agent_loop.types:Message", "cannot be made without arguments"),
        ("treadle.agent_loop.types:StopReason.X", "no attribute"),
        ("treadle.agent_loop:derive_seed", "no method run"),
    ],
)
def test_what_is_wrong_with_a_full_name_is_said(name: str, problem: str) -> None:
    with pytest.raises(UnknownLoopError, match=problem):
        LoopRegistry({}).resolve(name)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(SetupError, match="'tool_agent' is registered already"):
        default_loops().adding("tool_agent", SingleTurnLoop())


def test_a_row_without_agent_name_is_refused_when_tools_are_configured() -> None:
    """verl issues #2966 and #2986: the tools were silently never called (spec A3.9 #3)."""
    assert choose_loop("tool_agent", tools=["calc"], row="row 0") == "tool_agent"
    assert choose_loop(None, tools=[], row="row 0") == "single_turn_agent"
    with pytest.raises(SetupError, match=r"train.jsonl row 3 has no agent_name.*calc"):
        choose_loop(None, tools=["calc"], row="train.jsonl row 3")


def test_tools_that_no_row_can_call_are_refused() -> None:
    loops = default_loops()
    loops.check([task("single_turn_agent"), task("tool_agent")], tools=["calc"])
    loops.check([task("single_turn_agent")], tools=[])
    with pytest.raises(SetupError, match="calc are configured, but every row's agent_name"):
        loops.check([task("single_turn_agent")], tools=["calc"])
    with pytest.raises(UnknownLoopError):
        loops.check([task("nope")], tools=[])
