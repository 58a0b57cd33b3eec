"""Pinned semantics of the tool loop, numbered as the checks of `limits`."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import (
    AgentTask,
    ContractError,
    Image,
    LoopLimits,
    Message,
    OnMalformedCall,
    Origin,
    PromptTooLongError,
    RequestContext,
    SamplingParams,
    Services,
    SetupError,
    StopReason,
    ToolAgentLoop,
    ToolError,
    ToolFailure,
    ToolResult,
    Trajectory,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator, ScriptedTool
from treadle.agent_loop.testing.byte_renderer import END, decode
from treadle.agent_loop.testing.scripted import Reply

TOOL_START = 260
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": 1}}\n</tool_call>'
TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="tool_agent",
    messages=(Message(role="user", content="hi"),),
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
            sampling=SamplingParams(max_tokens=sampling_max),
            tools={tool.spec.name: tool for tool in tools},
        ),
        generator,
    )


def check_boundaries(trajectory: Trajectory, generator: ScriptedGenerator) -> None:
    """Each prompt begins with all tokens before it; the last span is the model's."""
    ids = trajectory.tokens.ids
    for request in generator.requests:
        assert ids[: len(request.prompt)] == request.prompt
    assert trajectory.tokens.spans[-1].origin is Origin.SAMPLED


def answers(trajectory: Trajectory) -> list[str]:
    return [m.content for m in trajectory.messages if m.role == "tool"]


@pytest.mark.asyncio
async def test_a_call_is_answered_and_the_model_ends() -> None:
    tool = ScriptedTool(results=[ToolResult(content="42", reward=0.5)])
    kit, generator = services([CALL, "It is 42."], tool)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.FINISHED
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[1].tool_calls[0].arguments == {"key": 1}
    assert trajectory.messages[2].tool_call_id == trajectory.messages[1].tool_calls[0].id
    assert trajectory.final_text == "It is 42."
    assert trajectory.num_turns == 4
    assert trajectory.tool_rewards == (0.5,)
    assert [tool.calls, tool.num_opened, tool.num_closed] == [[{"key": 1}], 1, 1]
    text = decode(trajectory.tokens.response_ids)
    assert text == f"{CALL}<end><tool>42<end><assistant>It is 42.<end>"
    check_boundaries(trajectory, generator)
    (session,) = {r.context.session_id for r in generator.requests}
    assert generator.finished_sessions == [session]
    assert len({r.context.request_id for r in generator.requests}) == 2


@pytest.mark.asyncio
async def test_1_finished_wins_over_the_limits() -> None:
    """An answer that just fits, in the last turn allowed, is an answer."""
    kit, _ = services(["four"], max_response_tokens=5, max_assistant_turns=1)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.FINISHED


@pytest.mark.asyncio
async def test_2_response_length_is_shared_by_model_and_tools() -> None:
    tool = ScriptedTool(results=["x" * 50])
    budget = len(CALL) + 1 + 50 + 3 + 4
    kit, generator = services([CALL, "12345678"], tool, max_response_tokens=budget)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.RESPONSE_LENGTH
    assert len(trajectory.tokens.response_ids) == budget
    assert generator.requests[1].params.max_tokens == 4
    assert trajectory.final_text == "1234"
    check_boundaries(trajectory, generator)


@pytest.mark.asyncio
async def test_3_context_length_counts_the_prompt() -> None:
    kit, generator = services(["123456789"], max_context_tokens=9)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.tokens.num_prompt_tokens == 5
    assert generator.requests[0].params.max_tokens == 4
    assert trajectory.stop is StopReason.CONTEXT_LENGTH


@pytest.mark.asyncio
async def test_4_a_cut_turn_ends_the_trajectory_even_with_a_call_in_it() -> None:
    tool = ScriptedTool()
    kit, _ = services([CALL + " and more"], tool, sampling_max=len(CALL) + 2)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.TURN_LENGTH
    assert tool.calls == []
    assert trajectory.tokens.ids[-1] != END


@pytest.mark.asyncio
async def test_5_assistant_turns() -> None:
    tool = ScriptedTool(results=["a"])
    kit, generator = services([CALL, CALL], tool, max_assistant_turns=2)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.ASSISTANT_TURNS
    assert (trajectory.assistant_turns, trajectory.user_turns) == (2, 1)
    check_boundaries(trajectory, generator)


@pytest.mark.asyncio
async def test_6_user_turns() -> None:
    tool = ScriptedTool(results=["a"])
    kit, generator = services([CALL, CALL], tool, max_user_turns=1)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.USER_TURNS
    check_boundaries(trajectory, generator)


@pytest.mark.asyncio
async def test_sixteen_and_sixteen_turns_are_thirty_two() -> None:
    tool = ScriptedTool(results=["a"] * 20)
    kit, _ = services([CALL] * 20, tool, max_assistant_turns=16, max_user_turns=16)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.num_turns == 32


@pytest.mark.asyncio
async def test_7_a_tool_can_stop() -> None:
    tool = ScriptedTool(results=[ToolResult(content="submitted", reward=1.0, stop=True)])
    kit, generator = services([CALL], tool)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.TOOL_STOP
    assert trajectory.tool_rewards == (1.0,)
    assert answers(trajectory) == []
    check_boundaries(trajectory, generator)


@pytest.mark.asyncio
async def test_8_an_answer_without_room_is_not_appended() -> None:
    tool = ScriptedTool(results=["x" * 20])
    kit, generator = services([CALL], tool, max_response_tokens=len(CALL) + 1 + 23)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.RESPONSE_LENGTH
    assert decode(trajectory.tokens.response_ids) == CALL + "<end>"
    assert answers(trajectory) == []
    assert trajectory.user_turns == 0
    assert len(tool.calls) == 1
    check_boundaries(trajectory, generator)


@pytest.mark.asyncio
async def test_9_an_answer_beyond_the_context_is_not_appended() -> None:
    tool = ScriptedTool(results=["x" * 20])
    prompt = len(ByteRenderer().render(TASK.messages, tools=[tool.spec]).ids)
    kit, generator = services([CALL], tool, max_context_tokens=prompt + len(CALL) + 1 + 23)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert trajectory.stop is StopReason.CONTEXT_LENGTH
    check_boundaries(trajectory, generator)


@pytest.mark.asyncio
async def test_10_only_the_first_calls_of_a_turn_run() -> None:
    tool = ScriptedTool(results=["a", "b"])
    kit, _ = services([CALL * 3, "done"], tool, max_parallel_calls=2)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert answers(trajectory) == ["a", "b"]
    assert ("tool/over_cap", 1) in [(m.name, m.value) for m in trajectory.metrics]


@pytest.mark.asyncio
async def test_11_calls_of_a_turn_run_at_the_same_time_and_answer_in_order() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    slow, fast = ScriptedTool("slow", [first]), ScriptedTool("fast", [second])
    names = [
        f'<tool_call>{{"name": "{n}", "arguments": {{}}}}</tool_call>' for n in ("slow", "fast")
    ]
    kit, _ = services(["".join(names), "done"], slow, fast, max_parallel_calls=2)
    run = asyncio.create_task(ToolAgentLoop().run(TASK, kit))
    await slow.until_called(1)
    await fast.until_called(1)
    second.set()
    first.set()
    trajectory = await run
    assert [m.name for m in trajectory.messages if m.role == "tool"] == ["slow", "fast"]


@pytest.mark.asyncio
async def test_12_a_malformed_call_is_answered() -> None:
    bad = '<tool_call>{"name": "lookup", "arguments": {"key": }}</tool_call>'
    kit, _ = services([bad, "sorry"], ScriptedTool())
    trajectory = await ToolAgentLoop().run(TASK, kit)
    (text,) = answers(trajectory)
    assert text.startswith("Invalid call of 'lookup': Expecting value")
    assert trajectory.stop is StopReason.FINISHED
    assert ("tool/parse_errors", 1) in [(m.name, m.value) for m in trajectory.metrics]


@pytest.mark.asyncio
async def test_13_a_malformed_call_can_be_ignored() -> None:
    kit, _ = services(["<tool_call>{oops}</tool_call>"], ScriptedTool())
    trajectory = await ToolAgentLoop(on_malformed_call=OnMalformedCall.IGNORE).run(TASK, kit)
    assert trajectory.stop is StopReason.FINISHED
    assert ("tool/parse_errors", 1) in [(m.name, m.value) for m in trajectory.metrics]


@pytest.mark.asyncio
async def test_14_an_unknown_tool_is_answered() -> None:
    call = '<tool_call>{"name": "nope", "arguments": {}}</tool_call>'
    kit, _ = services([call, "sorry"], ScriptedTool())
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert answers(trajectory) == ["Unknown function 'nope'. Available tools: ['lookup']"]
    (found,) = [f for f in trajectory.findings if f.kind == "unknown_tool"]
    assert found.text == "the model called 'nope'; it was shown ['lookup']"
    assert trajectory.tool_rewards == (0.0,)


@pytest.mark.asyncio
async def test_15_a_tool_failure_is_answered() -> None:
    kit, _ = services([CALL, "sorry"], ScriptedTool(results=[ToolFailure("no such key")]))
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert answers(trajectory) == ["Error executing tool 'lookup': no such key"]


@pytest.mark.asyncio
async def test_16_a_broken_tool_fails_the_attempt_and_is_closed() -> None:
    tool = ScriptedTool(results=[ConnectionError("sandbox is down")])
    kit, generator = services([CALL], tool)
    with pytest.raises(ToolError, match="tool 'lookup': ConnectionError: sandbox is down"):
        await ToolAgentLoop().run(TASK, kit)
    assert tool.num_closed == 1
    assert len(generator.finished_sessions) == 1


@pytest.mark.asyncio
async def test_17_a_tool_that_hangs_is_cut_and_the_model_is_told() -> None:
    tool = ScriptedTool(results=[asyncio.Event()])
    kit, _ = services([CALL, "sorry"], tool, tool_timeout_s=0.01)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert answers(trajectory) == ["Error executing tool 'lookup': it did not end within 0.01 s"]
    assert tool.num_closed == 1


@pytest.mark.asyncio
async def test_18_one_session_per_trajectory_opened_at_the_first_call() -> None:
    tool = ScriptedTool(results=["a", "b", "c"])
    kit, _ = services([CALL, CALL * 2, "done"], tool, max_parallel_calls=2)
    await ToolAgentLoop().run(TASK, kit)
    assert (tool.num_opened, tool.num_closed) == (1, 1)
    unused = ScriptedTool()
    kit, _ = services(["done"], unused)
    await ToolAgentLoop().run(TASK, kit)
    assert unused.num_opened == 0


@pytest.mark.asyncio
async def test_19_cancellation_closes_the_tools() -> None:
    tool = ScriptedTool(results=[asyncio.Event()])
    kit, generator = services([CALL], tool)
    run = asyncio.create_task(ToolAgentLoop().run(TASK, kit))
    await tool.until_called(1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert tool.num_closed == 1
    assert len(generator.finished_sessions) == 1


@pytest.mark.asyncio
async def test_20_long_texts_are_cut_after_the_reward_is_kept() -> None:
    tool = ScriptedTool(results=["abcdefghij"])
    kit, _ = services([CALL, "done"], tool, max_tool_response_chars=4)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert answers(trajectory) == ["ab...(truncated)...ij"]


@pytest.mark.asyncio
async def test_21_a_prompt_that_fills_the_context_fails_the_attempt() -> None:
    kit, generator = services([], max_context_tokens=5)
    with pytest.raises(PromptTooLongError, match="prompt of task 't' has 5 tokens"):
        await ToolAgentLoop().run(TASK, kit)
    assert generator.requests == []


@pytest.mark.asyncio
async def test_22_seeds_differ_by_turn_and_attempt_and_repeat() -> None:
    async def seeds(task: AgentTask) -> list[int | None]:
        kit, generator = services([CALL, "done"], ScriptedTool(results=["a"]))
        await ToolAgentLoop().run(task, kit)
        return [r.params.seed for r in generator.requests]

    first = await seeds(replace(TASK, seed=1))
    assert first == await seeds(replace(TASK, seed=1))
    assert len({*first, *await seeds(replace(TASK, seed=2))}) == 4
    assert await seeds(TASK) == [None, None]


@pytest.mark.asyncio
async def test_23_request_ids_fit_whatever_the_rows_are_called() -> None:
    kit, generator = services(["done"])
    await ToolAgentLoop().run(replace(TASK, task_id="\N{SNOWMAN}" * 100), kit)
    (request,) = generator.requests
    assert request.context.request_id.startswith("\N{SNOWMAN}" * 21 + "/0/")


@pytest.mark.asyncio
async def test_24_a_generator_that_gives_too_much_is_refused() -> None:
    full = await ScriptedGenerator(["too long"]).generate(
        [1],
        SamplingParams(max_tokens=100),
        request=RequestContext(request_id="r", session_id="s", deadline=math.inf),
    )
    kit, _ = services([full], max_response_tokens=3)
    with pytest.raises(ContractError, match="the completion has 9 tokens; max_tokens was 3"):
        await ToolAgentLoop().run(TASK, kit)


@pytest.mark.asyncio
async def test_26_tool_texts_are_cut_to_tokens_as_to_characters() -> None:
    tool = ScriptedTool(results=["abcdefghij"])
    kit, _ = services(
        [CALL, "done"], tool, max_tool_response_tokens=4, max_tool_response_chars=None
    )
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert answers(trajectory) == ["ab...(truncated)...ij"]


@pytest.mark.asyncio
async def test_27_a_row_selects_its_tools() -> None:
    """The others are neither shown nor found, though the run has them."""
    kept, other = ScriptedTool(results=["a"]), ScriptedTool("other")
    call = CALL.replace("lookup", "other")
    for extra in ({"tool_selection": ["lookup"]}, {"tool_selection": ("lookup",)}):
        kit, generator = services([call, "sorry"], ScriptedTool(results=["a"]), other)
        trajectory = await ToolAgentLoop().run(replace(TASK, fields={"extra_info": extra}), kit)
        assert answers(trajectory) == ["Unknown function 'other'. Available tools: ['lookup']"]
        shown = ByteRenderer().render(TASK.messages, tools=[kept.spec]).ids
        assert generator.requests[0].prompt == shown
    for everything in ({}, {"extra_info": None}, {"extra_info": {"tool_selection": None}}):
        kit, generator = services(["done"], kept, other)
        await ToolAgentLoop().run(replace(TASK, fields=everything), kit)
        shown = ByteRenderer().render(TASK.messages, tools=[kept.spec, other.spec]).ids
        assert generator.requests[0].prompt == shown
    kit, _ = services([], kept)
    unknown = replace(TASK, fields={"extra_info": {"tool_selection": ["lookup", "look"]}})
    with pytest.raises(SetupError, match=r"names \['look'\], which .* tools: \['lookup'\]"):
        await ToolAgentLoop().run(unknown, kit)
    for odd in ("lookup", 7, [7], [{"name": "lookup"}], [None], b"lookup"):
        task = replace(TASK, fields={"extra_info": {"tool_selection": odd}})
        with pytest.raises(SetupError, match="must be a list of names"):
            await ToolAgentLoop().run(task, kit)


@pytest.mark.asyncio
async def test_28_images_of_a_result_are_seen_by_every_later_turn() -> None:
    red, blue = (Image(data=data * 70, mime="image/png") for data in (b"r", b"b"))
    tool = ScriptedTool(
        results=[
            ToolResult(content="before <image> after", images=(red,)),
            ToolResult(content="unmarked", images=(blue,)),
        ]
    )
    kit, generator = services([CALL, CALL, "done"], tool)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert [len(request.images) for request in generator.requests] == [0, 1, 2]
    assert [placed.image for placed in trajectory.tokens.images] == [red, blue]
    text = decode(trajectory.tokens.response_ids)
    assert "<tool>before <image><image> after<end>" in text  # two ids stand for 70 bytes
    assert "<tool><image><image>unmarked<end>" in text
    assert [m.images for m in trajectory.messages if m.role == "tool"] == [(red,), (blue,)]


@pytest.mark.asyncio
async def test_29_a_text_that_is_cut_shows_its_images_first() -> None:
    red = Image(data=b"r", mime="image/png")
    long = ToolResult(content="abc<image>defghij", images=(red,))
    kit, _ = services([CALL, "done"], ScriptedTool(results=[long]), max_tool_response_chars=4)
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert answers(trajectory) == ["ab...(truncated)...ij"]
    nested = ToolResult(content="ab<ima<image>ge>cd", images=(red,))
    kit, _ = services([CALL, "done"], ScriptedTool(results=[nested]), max_tool_response_chars=3)
    again = await ToolAgentLoop().run(TASK, kit)
    assert answers(again) == ["a...(truncated)...d"]
    assert "<tool><image>ab...(truncated)...ij<end>" in decode(trajectory.tokens.response_ids)


@pytest.mark.asyncio
async def test_30_marks_without_images_are_plain_text_and_a_wrong_number_is_refused() -> None:
    kit, generator = services([CALL, "done"], ScriptedTool(results=["the tag <image> is HTML"]))
    trajectory = await ToolAgentLoop().run(TASK, kit)
    assert answers(trajectory) == ["the tag <image> is HTML"]
    assert generator.requests[1].images == ()
    with pytest.raises(ValueError, match="2 <image> marks for 1 images"):
        ToolResult(content="<image><image>", images=(Image(data=b"r", mime="image/png"),))


@pytest.mark.asyncio
async def test_31_the_first_malformed_calls_are_kept_as_examples() -> None:
    kit, _ = services(["<tool_call>{oops\x1b[2J}</tool_call>", "sorry"], ScriptedTool())
    trajectory = await ToolAgentLoop().run(TASK, kit)
    (found,) = [f for f in trajectory.findings if f.kind == "malformed_call"]
    assert found.text.endswith(r"<tool_call>{oops\x1b[2J}</tool_call>")


pieces = st.sampled_from(
    [CALL, CALL * 2, "text", "", "<tool_call>{oops}</tool_call>", CALL.replace("lookup", "nope")]
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(pieces, max_size=3).map("".join), min_size=12, max_size=12),
    st.lists(st.text("ab", max_size=40), min_size=40, max_size=40),
    st.integers(1, 400),
    st.integers(170, 700) | st.none(),
    st.integers(1, 150),
    st.integers(1, 6) | st.none(),
    st.integers(1, 6) | st.none(),
    st.integers(1, 3),
)
def test_25_the_invariants_hold_for_any_script_and_any_limits(
    replies: list[str],
    results: list[str],
    max_response: int,
    max_context: int | None,
    max_tokens: int,
    max_assistant: int | None,
    max_user: int | None,
    max_parallel: int,
) -> None:
    tool = ScriptedTool(results=results)
    kit, generator = services(
        replies,
        tool,
        sampling_max=max_tokens,
        max_response_tokens=max_response,
        max_context_tokens=max_context,
        max_assistant_turns=max_assistant or 12,
        max_user_turns=max_user,
        max_parallel_calls=max_parallel,
    )
    trajectory = asyncio.run(ToolAgentLoop().run(TASK, kit))
    check_boundaries(trajectory, generator)
    tokens = trajectory.tokens
    assert len(tokens.response_ids) <= max_response
    assert max_context is None or len(tokens.ids) <= max_context
    assert trajectory.assistant_turns == len(generator.requests)
    assert trajectory.assistant_turns == trajectory.user_turns + 1
    assert trajectory.assistant_turns <= (max_assistant or 12)
    assert max_user is None or trajectory.user_turns <= max_user
    said = [m.content for m in trajectory.messages if m.role == "tool"]
    assert tokens.response_ids.count(TOOL_START) == len(said)
    assert len(said) <= max_parallel * trajectory.user_turns
    assert tool.num_opened == tool.num_closed <= 1
