"""Pinned semantics of interactions in the tool loop, numbered as those of tools."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from treadle.agent_loop import (
    AgentTask,
    Interaction,
    InteractionError,
    InteractionReply,
    LoopLimits,
    Message,
    Origin,
    SamplingParams,
    Services,
    SetupError,
    SingleTurnLoop,
    StopReason,
    ToolAgentLoop,
    Trajectory,
)
from treadle.agent_loop.testing import (
    ByteRenderer,
    ScriptedGenerator,
    ScriptedInteraction,
    ScriptedTool,
)
from treadle.agent_loop.testing.byte_renderer import decode
from treadle.tracing import Metric, Reduce

CALL = '<tool_call>{"name": "lookup", "arguments": {}}</tool_call>'
TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="tool_agent",
    messages=(Message(role="user", content="hi"),),
    fields={"extra_info": {"interaction_kwargs": {"name": "teacher"}}},
)
WRONG = InteractionReply(content="Try again.", score=0.0)
RIGHT = InteractionReply(content="Right!", score=1.0, stop=True)


def services(
    replies: Sequence[str], interaction: Interaction, *tools: ScriptedTool, **limits: object
) -> Services:
    return Services(
        generator=ScriptedGenerator(replies),
        renderer=ByteRenderer(),
        limits=replace(LoopLimits(max_response_tokens=1000), **limits),  # type: ignore[arg-type]
        sampling=SamplingParams(max_tokens=500),
        tools={tool.spec.name: tool for tool in tools},
        interactions={"teacher": interaction},
    )


def said(text: str) -> ScriptedGenerator:
    return ScriptedGenerator([text])


def asked(trajectory: Trajectory) -> list[float]:
    return [m.value for m in trajectory.metrics if m.name == "interaction/replies"]


@pytest.mark.asyncio
async def test_1_a_turn_without_a_call_is_answered_until_the_interaction_stops() -> None:
    teacher = ScriptedInteraction([WRONG, RIGHT])
    trajectory = await ToolAgentLoop().run(TASK, services(["41", "42"], teacher))
    assert trajectory.stop is StopReason.FINISHED
    assert trajectory.turn_scores == (0.0, 1.0)
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert (
        decode(trajectory.tokens.response_ids) == "41<end><user>Try again.<end><assistant>42<end>"
    )
    assert (trajectory.assistant_turns, trajectory.user_turns) == (2, 1)
    assert teacher.conversations[1] == trajectory.messages
    assert (teacher.num_opened, teacher.num_closed) == (1, 1)
    assert asked(trajectory) == [2]


@pytest.mark.asyncio
async def test_2_tools_come_first_and_both_count_as_user_turns() -> None:
    teacher, tool = ScriptedInteraction([WRONG, RIGHT]), ScriptedTool(results=["a"])
    trajectory = await ToolAgentLoop().run(TASK, services([CALL, "41", "42"], teacher, tool))
    assert [m.role for m in trajectory.messages[1:]] == [
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert trajectory.user_turns == 2
    assert trajectory.tool_rewards == (0.0,)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        ({"max_response_tokens": 3}, StopReason.RESPONSE_LENGTH),
        ({"max_context_tokens": 8}, StopReason.CONTEXT_LENGTH),
        ({"max_assistant_turns": 1}, StopReason.ASSISTANT_TURNS),
        ({"max_response_tokens": 8}, StopReason.RESPONSE_LENGTH),
    ],
)
async def test_3_a_turn_that_reaches_a_limit_is_scored_and_not_answered(
    limits: dict[str, object], stop: StopReason
) -> None:
    trajectory = await ToolAgentLoop().run(
        TASK, services(["41"], ScriptedInteraction([WRONG]), **limits)
    )
    assert trajectory.stop is stop
    assert trajectory.turn_scores == (0.0,)
    assert trajectory.messages[-1].role == "assistant"
    assert trajectory.tokens.spans[-1].origin is Origin.SAMPLED


@pytest.mark.asyncio
async def test_4_user_turns_are_shared_with_the_tools() -> None:
    teacher, tool = ScriptedInteraction([WRONG]), ScriptedTool(results=["a"])
    kit = services([CALL, "41"], teacher, tool, max_user_turns=1)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.USER_TURNS
    assert trajectory.turn_scores == (0.0,)


@pytest.mark.asyncio
async def test_5_a_cut_turn_gets_no_reply() -> None:
    kit = services(["a long answer"], ScriptedInteraction())
    kit = replace(kit, sampling=SamplingParams(max_tokens=4))
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.TURN_LENGTH
    assert trajectory.turn_scores == ()


@pytest.mark.asyncio
async def test_6_who_names_none_talks_to_nobody() -> None:
    teacher = ScriptedInteraction()
    for extra in ({}, {"interaction_kwargs": None}):
        task = replace(TASK, fields={"extra_info": extra})
        trajectory = await ToolAgentLoop().run(task, services(["41"], teacher))
        assert trajectory.stop is StopReason.FINISHED
        assert asked(trajectory) == []
    trajectory = await SingleTurnLoop().run(TASK, services(["41"], teacher))
    assert trajectory.stop is StopReason.FINISHED
    assert teacher.num_opened == 0


@pytest.mark.asyncio
async def test_7_an_unknown_name_is_a_wrong_set_up() -> None:
    task = replace(TASK, fields={"extra_info": {"interaction_kwargs": {"name": "tutor"}}})
    with pytest.raises(SetupError, match=r"names 'tutor', which .*: \['teacher'\]"):
        await ToolAgentLoop().run(task, services([], ScriptedInteraction()))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("reply", "timeout_s", "text"),
    [
        (ConnectionError("user is away"), 60.0, "ConnectionError: user is away"),
        (asyncio.Event(), 0.01, "TimeoutError"),
    ],
)
async def test_8_a_broken_interaction_fails_the_attempt_and_is_closed(
    reply: Exception | asyncio.Event, timeout_s: float, text: str
) -> None:
    teacher = ScriptedInteraction([reply])
    with pytest.raises(InteractionError, match=f"the interaction of task 't': {text}") as raised:
        await ToolAgentLoop().run(TASK, services(["41"], teacher, tool_timeout_s=timeout_s))
    assert raised.value.retryable
    assert teacher.num_closed == 1


@pytest.mark.asyncio
async def test_9_cancellation_closes_the_session() -> None:
    teacher = ScriptedInteraction([asyncio.Event()])
    run = asyncio.create_task(ToolAgentLoop().run(TASK, services(["41"], teacher)))
    await teacher.until_asked(1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert teacher.num_closed == 1


@pytest.mark.asyncio
async def test_10_what_it_reports_is_carried_and_no_score_is_no_zero() -> None:
    mood = Metric("teacher/mood", 0.5, Reduce.MEAN)
    teacher = ScriptedInteraction([InteractionReply(content="Bye.", stop=True, metrics=(mood,))])
    trajectory = await ToolAgentLoop().run(TASK, services(["41"], teacher))
    assert mood in trajectory.metrics
    assert trajectory.turn_scores == ()
    with pytest.raises(TypeError, match="content must be a string, got NoneType"):
        InteractionReply(content=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the score is nan"):
        InteractionReply(content="", score=float("nan"))


class _Forgetful(ScriptedInteraction):
    async def open(self, task: AgentTask) -> "_Forgetful":  # type: ignore[override]
        return self

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        return None  # type: ignore[return-value]

    async def aclose(self) -> None:
        raise OSError("cannot hang up")


@pytest.mark.asyncio
async def test_11_bad_replies_and_closings_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(InteractionError, match=r"must return an InteractionReply, got None"):
        await ToolAgentLoop().run(TASK, services(["41"], _Forgetful()))
    assert "could not be closed: OSError: cannot hang up" in caplog.text


class _Clinging(ScriptedInteraction):
    """Does not even end when its closing is cancelled, until it is cancelled once more."""

    async def open(self, task: AgentTask) -> "_Clinging":  # type: ignore[override]
        return self

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        return RIGHT

    async def aclose(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_12_who_resists_the_closing_spoils_no_trajectory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("treadle.agent_loop.loops.limits._CLOSE_S", 0.05)
    trajectory = await ToolAgentLoop().run(TASK, services(["42"], _Clinging()))
    assert trajectory.turn_scores == (1.0,)
    assert "could not be closed: it did not end when it was cancelled" in caplog.text


@pytest.mark.asyncio
async def test_13_settings_without_a_name_are_refused_where_there_are_interactions() -> None:
    """A parquet column of structs holds null for every key in the rows without an interaction."""
    kit = services(["41"], ScriptedInteraction())
    for kwargs in ({"query": None, "name": None}, {}):
        task = replace(TASK, fields={"extra_info": {"interaction_kwargs": kwargs}})
        assert asked(await ToolAgentLoop().run(task, replace(kit, generator=said("41")))) == []
    task = replace(TASK, fields={"extra_info": {"interaction_kwargs": {"query": "q"}}})
    alone = replace(kit, interactions={}, generator=said("41"))
    assert asked(await ToolAgentLoop().run(task, alone)) == []
    with pytest.raises(SetupError, match=r"interaction_kwargs has \['query'\] and no name; "):
        await ToolAgentLoop().run(task, kit)
