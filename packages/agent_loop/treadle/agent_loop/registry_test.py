"""Tests of the loop registry."""

import pytest

from treadle.agent_loop import (
    LoopRegistry,
    SetupError,
    SingleTurnLoop,
    ToolAgentLoop,
    UnknownLoopError,
    default_loops,
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
