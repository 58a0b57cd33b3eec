"""Captured sessions: pinned semantics, numbered; the state machine is in session_property_test."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from treadle.agent_loop import (
    AgentTask,
    Completion,
    FinishReason,
    LoopError,
    LoopLimits,
    Message,
    OverloadedError,
    PromptTooLongError,
    RenderError,
    Rendering,
    SamplingParams,
    Services,
    StopReason,
    ToolSpec,
    Trajectory,
)
from treadle.agent_loop.capture import CapturedSession, LimitReachedError, SessionEndedError
from treadle.agent_loop.capture.branch import Continuation
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator

pytestmark = pytest.mark.asyncio

SYSTEM = Message(role="system", content="s")
USER = Message(role="user", content="u")
TOOLS = (ToolSpec(name="add", description="Adds."),)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.0}}\n</tool_call>'
TASK = AgentTask(task_id="t", sample_index=0, rollout_index=3, loop="x", messages=(USER,), seed=7)


def said(content: str) -> Message:
    return Message(role="assistant", content=content)


def asked(content: str) -> Message:
    return Message(role="user", content=content)


def services(
    generator: ScriptedGenerator, renderer: ByteRenderer | None = None, **limits: Any
) -> Services:
    return Services(
        generator=generator,
        renderer=renderer or ByteRenderer(),
        limits=replace(LoopLimits(max_response_tokens=1000), **limits),
        sampling=SamplingParams(max_tokens=500, temperature=1.0),
    )


def make(
    replies: Sequence[object], renderer: ByteRenderer | None = None, **limits: Any
) -> tuple[CapturedSession, ScriptedGenerator]:
    generator = ScriptedGenerator(replies)  # type: ignore[arg-type]
    return CapturedSession(TASK, services(generator, renderer, **limits)), generator


def texts(session: CapturedSession) -> list[tuple[str, str]]:
    """Of each sample: all of it, and what is under the loss mask."""
    decode = ByteRenderer().decode
    return [
        (
            decode(sample.ids),
            decode([t for t, on in zip(sample.ids, sample.loss_mask, strict=True) if on]),
        )
        for sample in session.samples()
    ]


def metric(trajectory: Trajectory, name: str) -> float:
    return next(m.value for m in trajectory.metrics if m.name == name)


async def test_1_a_history_sent_back_as_it_was_extends_its_branch() -> None:
    session, generator = make(["one", "two"])
    first = await session.complete([USER])
    second = await session.complete([USER, first.parsed.message, asked("v")])
    assert (first.how, second.how) == (Continuation.ROOT, Continuation.EXACT)
    assert texts(session) == [
        ("<user>u<end><assistant>one<end><user>v<end><assistant>two<end>", "one<end>two<end>")
    ]
    assert second.num_prompt_tokens == len(generator.requests[1].prompt)


async def test_2_a_harmless_rewrite_keeps_the_sampled_ids() -> None:
    session, _ = make([" one ", "two"])
    await session.complete([USER])
    second = await session.complete([USER, said("one"), asked("v")])
    assert second.how is Continuation.REALIGNED
    assert texts(session) == [
        ("<user>u<end><assistant> one <end><user>v<end><assistant>two<end>", " one <end>two<end>")
    ]


async def test_3_an_edited_answer_forks_and_nothing_is_trained_twice() -> None:
    session, _ = make(["one", "two", "three"])
    first = await session.complete([USER])
    history = [USER, first.parsed.message, asked("v")]
    await session.complete(history)
    third = await session.complete([*history, said("edited"), asked("w")])
    assert third.how is Continuation.FORK
    assert texts(session) == [
        ("<user>u<end><assistant>one<end><user>v<end><assistant>two<end>", "one<end>two<end>"),
        (
            "<user>u<end><assistant>one<end><user>v<end><assistant>edited<end><user>w<end>"
            "<assistant>three<end>",
            "three<end>",
        ),
    ]


async def test_4_the_ids_of_a_shared_turn_are_the_sampled_ones_also_in_a_fork() -> None:
    session, _ = make([" one ", "two", "three"])
    await session.complete([USER])
    await session.complete([USER, said("one"), asked("v")])
    await session.complete([USER, said("one"), asked("w")])
    fork, trained = texts(session)[1]
    assert fork == "<user>u<end><assistant> one <end><user>w<end><assistant>three<end>"
    assert trained == "three<end>"


async def test_5_a_request_sent_again_is_sampled_again_as_a_sample_of_its_own() -> None:
    session, generator = make(["one", "two", "three"])
    await session.complete([USER])
    again = await session.complete([USER])
    assert again.how is Continuation.FORK
    assert generator.requests[0].prompt == generator.requests[1].prompt
    third = await session.complete([USER, said("one"), asked("v")])
    assert third.how is Continuation.EXACT
    assert [trained for _, trained in texts(session)] == ["two<end>", "one<end>three<end>"]


async def test_6_other_tools_or_another_system_prompt_are_a_root() -> None:
    session, _ = make(["one", "two", "three"])
    first = await session.complete([USER])
    longer = [USER, first.parsed.message, asked("v")]
    assert (await session.complete(longer, tools=TOOLS)).how is Continuation.ROOT
    assert (await session.complete([SYSTEM, *longer])).how is Continuation.ROOT
    assert len(session.samples()) == 3


async def test_7_two_requests_on_one_branch_at_once_fork() -> None:
    session, generator = make(["one", "two", "three"])
    first = await session.complete([USER])
    longer = [USER, first.parsed.message, asked("v")]
    generator.hold()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(session.complete(longer)) for _ in range(2)]
        await generator.until_running(2)
        assert session.num_under_way == 2
        generator.release()
    assert [call.result().how for call in calls] == [Continuation.EXACT, Continuation.FORK]
    assert [trained for _, trained in texts(session)] == ["one<end>two<end>", "three<end>"]


async def test_8_a_request_that_fails_or_is_cancelled_leaves_no_trace() -> None:
    session, generator = make(["one", OverloadedError("full"), "two"])
    first = await session.complete([USER])
    before = session.samples()
    longer = [USER, first.parsed.message, asked("v")]
    with pytest.raises(OverloadedError):
        await session.complete(longer)
    generator.hold()
    call = asyncio.create_task(session.complete(longer))
    await generator.until_running(1)
    call.cancel()
    await asyncio.wait([call])
    generator.release()
    assert session.samples() == before
    assert (await session.complete(longer)).how is Continuation.EXACT
    assert metric(session.finish(), "capture/failed") == 2


async def test_9_calls_are_returned_with_ids_that_are_unique_in_the_session() -> None:
    session, _ = make([CALL, CALL])
    first = await session.complete([USER], tools=TOOLS)
    call = first.parsed.message.tool_calls[0]
    answer = Message(role="tool", content="3", tool_call_id=call.id)
    second = await session.complete([USER, first.parsed.message, answer], tools=TOOLS)
    assert second.how is Continuation.EXACT
    assert second.parsed.message.tool_calls[0].id != call.id


async def test_10_no_call_is_looked_for_where_no_tool_was_offered() -> None:
    session, _ = make([CALL])
    turn = await session.complete([USER])
    assert turn.parsed.message == said(CALL)
    assert turn.requests == ()


async def test_11_tokens_that_a_limit_forbids_are_not_sampled() -> None:
    session, generator = make(["one", "two", "three"], max_response_tokens=12)
    await session.complete([USER])
    with pytest.raises(LimitReachedError, match="response_length") as caught:
        await session.complete([USER, said("one"), asked("a long answer")])
    assert caught.value.stop is StopReason.RESPONSE_LENGTH
    assert len(generator.requests) == 1
    compacted = await session.complete([asked("a long answer, compacted")])
    assert compacted.how is Continuation.ROOT
    assert session.finish().stop is StopReason.FINISHED


async def test_12_a_refused_last_request_is_the_reason_of_the_stop() -> None:
    session, _ = make(["one", "two"], max_context_tokens=16)
    await session.complete([USER])
    with pytest.raises(LimitReachedError, match="context_length"):
        await session.complete([USER, said("one"), asked("a long answer")])
    trajectory = session.finish()
    assert trajectory.stop is StopReason.CONTEXT_LENGTH
    assert metric(trajectory, "capture/refused") == 1


async def test_13_turns_are_limited_over_the_session_those_under_way_included() -> None:
    session, generator = make(["one", "two"], max_assistant_turns=2)
    generator.hold()
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(session.complete([USER]))
        await generator.until_running(2)
        with pytest.raises(LimitReachedError, match="assistant_turns"):
            await session.complete([SYSTEM, USER])
        generator.release()
    assert session.assistant_turns == 2


async def test_14_answers_are_limited_and_roots_are_none() -> None:
    session, _ = make(["one", "two", "three"], max_user_turns=1)
    await session.complete([USER])
    await session.complete([USER, said("one"), asked("v")])
    with pytest.raises(LimitReachedError, match="user_turns"):
        await session.complete([USER, said("one"), asked("w")])
    await session.complete([SYSTEM, USER])
    trajectory = session.finish()
    assert (trajectory.assistant_turns, trajectory.user_turns) == (3, 1)


async def test_15_a_completion_is_cut_to_what_is_left_and_to_max_tokens() -> None:
    session, generator = make(["one", "two", "three"], max_response_tokens=20)
    cut = await session.complete([USER], max_tokens=2)
    assert cut.finish is FinishReason.LENGTH
    assert session.finish().stop is StopReason.TURN_LENGTH
    assert generator.requests[0].params.max_tokens == 2
    session, generator = make(["one", "twoooooooooooooo"], max_response_tokens=16)
    await session.complete([USER])
    await session.complete([USER, said("one"), asked("v")])
    assert [r.params.max_tokens for r in generator.requests] == [16, 8]
    assert session.finish().stop is StopReason.RESPONSE_LENGTH


async def test_16_a_cut_turn_that_is_answered_is_closed_by_the_template() -> None:
    session, _ = make(["one", "two"])
    await session.complete([USER], max_tokens=2)
    await session.complete([USER, said("on"), asked("v")])
    whole, trained = texts(session)[0]
    assert whole == "<user>u<end><assistant>on<end><user>v<end><assistant>two<end>"
    assert trained == "ontwo<end>"


async def test_17_requests_have_seeds_of_their_own_unless_they_bring_one() -> None:
    session, generator = make(["one", "two", "three"])
    await session.complete([USER])
    await session.complete([SYSTEM, USER])
    await session.complete([SYSTEM, SYSTEM, USER], seed=5)
    seeds = [request.params.seed for request in generator.requests]
    assert len(set(seeds)) == 3
    assert seeds[2] == 5
    assert len({request.context.request_id for request in generator.requests}) == 3
    assert {r.context.session_id for r in generator.requests} == {session.session_id}


async def test_18_a_stop_string_cuts_tokens_and_text_and_may_come_back() -> None:
    session, _ = make(["go</code>on", "two"])
    first = await session.complete([USER], stop=["</code>"])
    assert first.parsed.message.content == "go"
    second = await session.complete([USER, said("go</code>"), asked("v")])
    assert second.how is Continuation.REALIGNED
    assert texts(session)[0][1] == "go</code>two<end>"
    trajectory = session.finish()
    assert metric(trajectory, "capture/tokens_past_stop") == 3
    assert metric(trajectory, "drift/sampled") == metric(trajectory, "drift/observed") == 0
    assert trajectory.messages[1] == said("go")


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "there are none"),
        ([USER, said("x")], {}, "the last one is the assistant's"),
        ([USER], {"max_tokens": 0}, "max_tokens is 0"),
        ([USER], {"stop": [""]}, "a stop string is empty"),
    ],
)
async def test_19_requests_that_mean_nothing_are_refused(
    messages: list[Message], options: dict[str, object], words: str
) -> None:
    session, generator = make([])
    with pytest.raises(ValueError, match=words):
        await session.complete(messages, **options)  # type: ignore[arg-type]
    assert generator.requests == []


async def test_20_nothing_is_sampled_or_written_after_the_end() -> None:
    session, generator = make(["one", "two"])
    with session:
        await session.complete([USER])
        generator.hold()
        late = asyncio.create_task(session.complete([SYSTEM, USER]))
        await generator.until_running(1)
        trajectory = session.finish()
        generator.release()
        with pytest.raises(SessionEndedError):
            await late
        with pytest.raises(SessionEndedError):
            await session.complete([USER])
    assert len(trajectory.samples) == 1
    assert generator.finished_sessions == [session.session_id]


async def test_21_an_agent_that_asked_for_nothing_has_no_trajectory() -> None:
    session, _ = make([])
    with pytest.raises(LoopError, match="got no completion"):
        session.finish()


async def test_22_the_last_written_branch_is_the_trajectory_s_conversation() -> None:
    session, _ = make(["main", "helper", "done"])
    first = await session.complete([USER])
    await session.complete([SYSTEM, USER])
    await session.complete([USER, first.parsed.message, asked("v")])
    trajectory = session.finish(reward=0.5)
    assert trajectory.final_text == "done"
    assert [m.content for m in trajectory.messages] == ["u", "main", "v", "done"]
    assert trajectory.tokens == trajectory.samples[-1]
    assert trajectory.reward == 0.5
    assert metric(trajectory, "capture/samples") == 2
    assert metric(trajectory, "capture/root") == 2


class Overtaken(ScriptedGenerator):
    """Answers the first request after the second."""

    def __init__(self, replies: Sequence[str]) -> None:
        super().__init__(replies)
        self.answered = asyncio.Event()

    async def generate(self, prompt, params, *, request, images=()) -> Completion:  # type: ignore[no-untyped-def]
        completion = await super().generate(prompt, params, request=request, images=images)
        if request.request_id.endswith("/0"):
            await self.answered.wait()
        return completion


async def test_28_why_a_trajectory_ended_is_why_its_last_conversation_did() -> None:
    order: list[int] = []
    generator = Overtaken(["one", "it goes on"])
    session = CapturedSession(TASK, services(generator))

    async def ask(messages: list[Message], max_tokens: int | None = None) -> None:
        order.append((await session.complete(messages, max_tokens=max_tokens)).number)
        generator.answered.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(ask([SYSTEM, USER]))
        group.create_task(ask([USER], max_tokens=5))
    trajectory = session.finish()
    assert order == [1, 0]
    assert [message.content for message in trajectory.messages] == ["u", "it go"]
    assert trajectory.stop is StopReason.TURN_LENGTH


class StubbornRenderer(ByteRenderer):
    """A template that cannot go on after a turn."""

    def extend(self, ids, messages, *, tools, history=()) -> Rendering:  # type: ignore[no-untyped-def]
        raise RenderError("cannot be extended")


async def test_23_what_the_template_cannot_extend_is_rendered_anew_as_a_fork() -> None:
    session, _ = make([" one ", "two"], StubbornRenderer())
    first = await session.complete([USER])
    second = await session.complete([USER, replace(first.parsed.message), asked("v")])
    assert second.how is Continuation.FORK
    assert [trained for _, trained in texts(session)] == [" one <end>", "two<end>"]


async def test_24_a_template_that_refuses_the_messages_is_the_caller_s_error() -> None:
    class Refusing(ByteRenderer):
        def render(self, messages, *, tools) -> Rendering:  # type: ignore[no-untyped-def]
            raise RenderError("roles must alternate")

    session, generator = make([], Refusing())
    with pytest.raises(RenderError, match="roles must alternate"):
        await session.complete([USER])
    assert generator.requests == []


async def test_25_a_trajectory_says_why_its_agent_s_requests_forked() -> None:
    session, _ = make(["one", "two", "three", "four", "five"])
    first = await session.complete([USER])
    history = [USER, first.parsed.message, asked("v")]
    await session.complete(history)
    await session.complete(history)
    await session.complete([USER, said("edited"), asked("v")])
    await session.complete([USER, first.parsed.message, asked("w")])
    findings = [f.text for f in session.finish().findings if f.kind == "fork"]
    assert findings == [
        "request 2: its 3 messages were answered before: it was sent again",
        "request 3: message 2 of 4, assistant 'one', has become assistant 'edited'",
        "request 4: message 3 of 4, user 'v', has become user 'w'",
    ]


async def test_26_findings_tell_of_edits_and_of_requests_at_the_same_time() -> None:
    session, generator = make(["one", "two", "three", "four"])
    first = await session.complete([USER])
    longer = [USER, first.parsed.message, asked("v")]
    second = await session.complete(longer)
    generator.hold()
    async with asyncio.TaskGroup() as group:
        whole = [*longer, second.parsed.message, asked("w")]
        for _ in range(2):
            group.create_task(session.complete(whole))
        await generator.until_running(2)
        generator.release()
    assert [f.text for f in session.finish().findings] == [
        "request 3: another request extends the same branch at the same time"
    ]


async def test_27_malformed_calls_are_findings_and_drift_is_measured() -> None:
    session, _ = make(['<tool_call>{"name": }</tool_call>', " two"])
    await session.complete([USER], tools=TOOLS)
    await session.complete([SYSTEM, USER], tools=TOOLS)
    trajectory = session.finish()
    assert [f.kind for f in trajectory.findings] == ["malformed_call"]
    assert metric(trajectory, "tool/parse_errors") == 1
    assert metric(trajectory, "drift/turns") == 7
    assert metric(trajectory, "drift/sampled") == 0


class SlowRenderer(ByteRenderer):
    """Renders a long text only after the event loop has done something else."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.waited: list[bool] = []

    def _hold(self, messages: Sequence[Message]) -> None:
        if len(messages[-1].content) > 1 << 16:
            self.begun.set()
            self.waited.append(self.go_on.wait(timeout=60))

    def render(self, messages: Sequence[Message], **more: Any) -> Rendering:
        self._hold(messages)
        return super().render(messages, **more)

    def extend(self, ids: Any, messages: Sequence[Message], **more: Any) -> Rendering:
        self._hold(messages)
        return super().extend(ids, messages, **more)


async def test_a_long_request_is_rendered_beside_the_event_loop() -> None:
    renderer = SlowRenderer()
    session, _ = make(["one", "two", "three"], renderer, max_response_tokens=1 << 20)
    first = await session.complete([USER])
    long = asyncio.create_task(
        session.complete([USER, first.parsed.message, asked("v" * (1 << 17))])
    )
    await asyncio.to_thread(renderer.begun.wait, 60)
    # A request of the same session in the meantime does not take the branch from under it.
    short = asyncio.create_task(session.complete([USER, first.parsed.message, asked("w")]))
    renderer.go_on.set()
    assert {(await long).how, (await short).how} == {Continuation.EXACT, Continuation.FORK}
    assert (await long).how is Continuation.EXACT
    assert renderer.waited == [True]


async def test_a_session_that_ends_during_rendering_samples_nothing() -> None:
    renderer = SlowRenderer()
    session, generator = make(["one"], renderer, max_response_tokens=1 << 20)
    long = asyncio.create_task(session.complete([asked("v" * (1 << 17))]))
    await asyncio.to_thread(renderer.begun.wait, 60)
    session.close()
    renderer.go_on.set()
    with pytest.raises(SessionEndedError):
        await long
    assert renderer.waited == [True] and not generator.requests


class RefusingRenderer(ByteRenderer):
    """Is bounded, and refuses what is longer."""

    bound = 0

    def bounded(self, max_tokens: int) -> "RefusingRenderer":
        renderer = RefusingRenderer()
        renderer.bound = max_tokens
        return renderer

    def render(self, messages: Sequence[Message], **more: Any) -> Rendering:
        if len(messages[-1].content) > self.bound:
            raise PromptTooLongError(f"longer than {self.bound}")
        return super().render(messages, **more)


async def test_the_bound_of_the_context_reaches_the_renderer() -> None:
    session, generator = make(["one"], RefusingRenderer(), max_context_tokens=50)
    with pytest.raises(LimitReachedError, match=r"and longer than 50 \(max_resp") as refused:
        await session.complete([asked("v" * 51)])
    assert refused.value.stop is StopReason.CONTEXT_LENGTH
    assert not generator.requests
    await session.complete([asked("v" * 5)])


class IdWriter(ByteRenderer):
    """Writes the ids of results, as Kimi's template does, and no second system message."""

    def _write(self, before: Sequence[int], messages: Sequence[Message]) -> Rendering:
        if any(m.role == "system" for m in messages[1:]):
            raise RenderError("chat template: TemplateError: System message must be first")
        written = [
            replace(m, content=f"{m.tool_call_id}={m.content}") if m.role == "tool" else m
            for m in messages
        ]
        return super()._write(before, written)


async def test_results_have_the_ids_that_the_model_wrote_whatever_the_agent_calls_them() -> None:
    session, _ = make([CALL, CALL, "done"], IdWriter())
    history = [USER]
    for number in range(2):
        turn = await session.complete(history, tools=TOOLS)
        (call,) = turn.parsed.message.tool_calls
        assert call.id == f"call_{number}"  # unique for the agent; the model wrote the first twice
        renamed = replace(turn.parsed.message, tool_calls=(replace(call, id=f"toolu_{number}"),))
        answer = Message(role="tool", content="3", tool_call_id=f"toolu_{number}")
        history = [*history, renamed, answer]
    last = await session.complete(history, tools=TOOLS)
    assert last.how is Continuation.REALIGNED
    ((whole, _),) = texts(session)
    assert whole.count("<tool>call_0=3<end>") == 2
    assert [m.value for m in session.finish().metrics if m.name == "drift/observed"] == [0]


async def test_system_messages_where_the_template_takes_none_are_the_user_s_text() -> None:
    """Claude Code sends one after the user's first message, and more between turns."""
    session, _ = make(["one", "two"], IdWriter())
    late = Message(role="system", content="late")
    opening = [SYSTEM, Message(role="system", content="t"), USER, late]
    first = await session.complete(opening)
    await session.complete([*opening, first.parsed.message, late, asked("v")])
    ((whole, _),) = texts(session)
    assert whole == (
        "<system>s\n\nt<end><user>u<end><user>late<end><assistant>one<end>"
        "<user>late<end><user>v<end><assistant>two<end>"
    )
    trajectory = session.finish()
    assert trajectory.messages[:4] == tuple(opening)
    assert (metric(trajectory, "capture/fitted"), metric(trajectory, "drift/observed")) == (2, 0)


async def test_a_conversation_that_no_form_helps_is_refused_with_the_template_s_sentence() -> None:
    class NoSystem(ByteRenderer):
        def _write(self, before: Sequence[int], messages: Sequence[Message]) -> Rendering:
            if any(m.role == "tool" for m in messages):
                raise RenderError("chat template: TemplateError: No results here")
            return super()._write(before, messages)

    session, _ = make(["one"], NoSystem())
    answer = Message(role="tool", content="3", tool_call_id="c")
    with pytest.raises(RenderError, match="TemplateError: No results here"):
        await session.complete([SYSTEM, SYSTEM, USER, said("x"), answer])


async def test_a_finding_names_what_an_edit_changed() -> None:
    session, _ = make([CALL, "two"])
    turn = await session.complete([USER], tools=TOOLS)
    (call,) = turn.parsed.message.tool_calls
    edited = replace(turn.parsed.message, tool_calls=(replace(call, arguments={"a": 2}),))
    answer = Message(role="tool", content="3", tool_call_id=call.id)
    await session.complete([USER, edited, answer], tools=TOOLS)
    fork = next(f for f in session.finish().findings if f.kind == "fork")
    assert "assistant '' with 1 calls with the tool_calls (ToolCall(id='call_0'" in fork.text
    assert "has become (ToolCall(id='call_0', name='add', arguments={'a': 2}),)" in fork.text
