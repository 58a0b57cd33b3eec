"""A class as tools: one instance per trajectory, made of the row, checked, scored and closed."""

from collections.abc import Mapping
from typing import Any

import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    SetupError,
    ToolAgentLoop,
    ToolError,
    ToolResult,
    Trajectory,
    class_tools,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator

CLOSED: list["Game"] = []
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


class Game:
    def __init__(self, number: int, highest: int = 20) -> None:
        self.number, self.highest = number, highest
        self.guesses: list[int] = []

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: From 1 to the highest.
        """
        self.guesses.append(number)
        return "right" if number == self.number else "low" if number < self.number else "high"

    async def give_up(self) -> ToolResult:
        """Give up."""
        return ToolResult(content="", stop=True)

    def reward(self) -> Mapping[str, float]:
        won = self.guesses[-1:] == [self.number]
        return {"score": won / max(len(self.guesses), 1), "won": won}

    def close(self) -> None:
        CLOSED.append(self)


def task(**extra: object) -> AgentTask:
    return AgentTask(
        task_id="0",
        sample_index=0,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="Guess."),),
        fields={"number": 99, "extra_info": extra},
    )


async def play(*texts: str, made: type = Game, **extra: object) -> Trajectory:
    services = Services(
        generator=ScriptedGenerator(list(texts)),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=1000, max_parallel_calls=4),
        sampling=SamplingParams(max_tokens=200),
        tools=class_tools(made),
    )
    return await ToolAgentLoop().run(task(**extra), services)


@pytest.mark.asyncio
async def test_the_calls_of_a_trajectory_share_an_instance_that_scores_it() -> None:
    CLOSED.clear()
    both = CALL % ("guess", '{"number": 5}') + CALL % ("guess", '{"number": 8}')
    played = await play(both, CALL % ("guess", '{"number": 7}'), "Done.", number=7)
    shown = [m.content for m in played.messages if m.role == "tool"]
    assert shown == ["low", "high", "right"]
    assert played.reward == 1 / 3
    assert [m.value for m in played.metrics if m.name == "reward/won"] == [1.0]
    assert [game.guesses for game in CLOSED] == [[5, 8, 7]]
    again = await play(CALL % ("give_up", "{}"))  # the column, where extra_info has none
    assert (again.reward, again.stop) == (0.0, "tool_stop")
    assert CLOSED[1].number == 99
    assert (await play("I do not know.")).reward == 0.0


@pytest.mark.asyncio
async def test_arguments_that_do_not_fit_never_reach_a_method() -> None:
    played = await play(CALL % ("guess", '{"number": "7"}'), "Done.")
    shown = [m.content for m in played.messages if m.role == "tool"]
    assert "expected integer" in str(shown)
    assert CLOSED[-1].guesses == []


def test_a_row_that_lacks_what_the_class_takes_is_refused() -> None:
    class Needs(Game):
        def reset(self, level: str) -> None: ...

    (tool, *_) = class_tools(Needs).values()
    with pytest.raises(SetupError, match=r"takes level, and the row has none: .* has: number"):
        tool.check_task(task())
    tool.check_task(task(level="easy"))
    (tool, *_) = class_tools(Game, {"highest": 9}).values()
    tool.check_task(task())


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({}, "has no public method"),
        ({"guess": lambda self, number: ""}, "has no docstring"),
        ({"reward": lambda self: 1.0}, "has no public method"),
    ],
)
def test_a_class_that_cannot_be_described_is_refused(members: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        class_tools(type("Bad", (), members))


def test_a_setting_that_the_class_does_not_take_is_refused() -> None:
    with pytest.raises(TypeError, match="Game takes no hihgest; it takes: number, highest"):
        class_tools(Game, {"hihgest": 9})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("reward", lambda self: None, "the reward is None; it must be a finite number"),
        ("reward", lambda self: {"won": 1}, 'the mapping has no "score"; it has: won'),
        ("reset", lambda self: "Hello.", "returned 'Hello.', which the model does not see"),
    ],
)
async def test_what_a_class_returns_is_checked(name: str, value: Any, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        await play("Done.", made=type("Bad", (Game,), {name: value}))
