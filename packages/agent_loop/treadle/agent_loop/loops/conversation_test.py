"""Tests of conversations: several of one trajectory, their seeds, sessions and samples."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import (
    AgentTask,
    Conversation,
    Image,
    LoopLimits,
    Message,
    Origin,
    PromptTooLongError,
    SamplingParams,
    Services,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.agent_loop.testing.byte_renderer import IMAGE, decode

QUESTION = Message(role="user", content="hi")
TASK = AgentTask(
    task_id="t", sample_index=0, rollout_index=0, loop="x", messages=(QUESTION,), seed=5
)


def services(generator: ScriptedGenerator, **limits: int) -> Services:
    return Services(
        generator=generator,
        renderer=ByteRenderer(),
        limits=replace(LoopLimits(max_response_tokens=1000), **limits),  # type: ignore[arg-type]
        sampling=SamplingParams(max_tokens=100),
    )


@pytest.mark.asyncio
async def test_conversations_of_a_trajectory_are_its_samples_in_the_order_of_their_beginning() -> (
    None
):
    generator = ScriptedGenerator(["first", "second", "third", "fourth"])
    with Conversation(TASK, services(generator)) as chat:
        await chat.generate()
        child = chat.another([Message(role="user", content="sub")])
        await child.generate()
        grandchild = child.another([Message(role="user", content="subsub")])
        await grandchild.generate()
        assert chat.answer([Message(role="user", content="and?")]) is None
        await chat.generate()
        assert (chat.assistant_turns, chat.all_assistant_turns, chat.all_user_turns) == (2, 4, 1)
        trajectory = chat.finish(StopReason.FINISHED)
    assert [decode(sample.response_ids) for sample in trajectory.samples] == [
        "second<end>",
        "third<end>",
        "first<end><user>and?<end><assistant>fourth<end>",
    ]
    assert trajectory.task is TASK
    assert trajectory.messages == chat.messages
    assert trajectory.tokens is trajectory.samples[-1]
    assert (trajectory.assistant_turns, trajectory.user_turns) == (4, 1)
    assert trajectory.num_sampled_tokens == len("firstsecondthirdfourth") + 4
    sessions = {request.context.session_id for request in generator.requests}
    assert set(generator.finished_sessions) == sessions
    assert len(sessions) == 3


@pytest.mark.asyncio
async def test_any_of_them_may_be_the_last() -> None:
    with Conversation(TASK, services(ScriptedGenerator(["long", "short"]))) as chat:
        await chat.generate()
        silent = chat.another([QUESTION])
        later = chat.another([Message(role="user", content="notes")])
        await later.generate()
        trajectory = later.finish(StopReason.FINISHED)
    assert [decode(s.response_ids) for s in trajectory.samples] == ["long<end>", "short<end>"]
    assert trajectory.messages[0].content == "notes"
    assert silent.messages == (QUESTION,)


@pytest.mark.asyncio
async def test_each_has_seeds_of_its_own_that_repeat() -> None:
    async def seeds(task: AgentTask, base: int | None = None) -> list[int | None]:
        generator = ScriptedGenerator(["a"] * 4)
        kit = services(generator)
        kit = replace(kit, sampling=replace(kit.sampling, seed=base))
        with Conversation(task, kit) as chat:
            await chat.generate()
            for _ in range(3):
                await chat.another([QUESTION]).generate()
        return [request.params.seed for request in generator.requests]

    first = await seeds(TASK)
    assert len(set(first)) == 4
    assert first == await seeds(TASK)
    without = replace(TASK, seed=None)
    assert len({*await seeds(without, base=1), *first}) == 8
    assert await seeds(without) == [None] * 4


@pytest.mark.asyncio
async def test_limits_hold_for_each_and_room_can_be_kept() -> None:
    kit = services(ScriptedGenerator(["12345678", "12345678"]), max_response_tokens=12)
    with Conversation(TASK, kit) as chat:
        turn = await chat.generate(max_tokens=4)
        assert (turn.closed, chat.tokens_left) == (False, 8)
        hello = [Message(role="user", content="x")]  # with the end of the turn before it: 5 ids
        assert chat.answer(hello, reserve=3) is StopReason.RESPONSE_LENGTH
        assert chat.answer(hello, reserve=2) is None
        child = chat.another([QUESTION])
        await child.generate()
        assert child.tokens_left == 3
    with pytest.raises(ValueError, match="after the budget was used up"):
        await chat.generate(max_tokens=0)
    narrow = services(ScriptedGenerator(), max_context_tokens=10)
    with Conversation(TASK, narrow) as chat, pytest.raises(PromptTooLongError, match="has 12 tok"):
        chat.another([Message(role="user", content="x" * 9)])


@pytest.mark.asyncio
async def test_an_error_leaves_no_session_open() -> None:
    generator = ScriptedGenerator(["a"])
    with pytest.raises(RuntimeError), Conversation(TASK, services(generator)) as chat:
        with chat.another([QUESTION]) as child:
            await child.generate()
        assert generator.finished_sessions == [child.session_id]
        chat.another([QUESTION])
        raise RuntimeError
    assert len(set(generator.finished_sessions)) == 3


step = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 3)),
    st.tuples(st.just("generate"), st.integers(0, 5)),
    st.tuples(st.just("answer"), st.integers(0, 5)),
)
PICTURE = Image(data=b"p" * 100, mime="image/png")


@settings(deadline=None, max_examples=60)
@given(st.lists(step, max_size=14), st.integers(0, 5), st.integers(20, 120))
def test_every_sampled_token_is_in_exactly_one_sample(
    steps: list[tuple[str, int]], last: int, max_response: int
) -> None:
    async def run() -> tuple[Trajectory, ScriptedGenerator]:
        generator = ScriptedGenerator([f"<{n}>" for n in range(len(steps))])
        kit = services(generator, max_response_tokens=max_response)
        with Conversation(TASK, kit) as chat:
            chats, closed = [chat], [False]
            for what, number in steps:
                at = number % len(chats)
                if what == "begin":
                    images = (PICTURE,) * number
                    begun = [Message(role="user", content=f"({number})", images=images)]
                    chats.append(chats[at].another(begun))
                    closed.append(False)
                elif what == "generate" and not closed[at] and chats[at].tokens_left > 0:
                    await chats[at].generate()
                    closed[at] = True
                elif what == "answer" and closed[at]:
                    seen = Message(role="tool", content="see", images=(PICTURE,))
                    closed[at] = chats[at].answer([seen]) is not None
            return chats[last % len(chats)].finish(StopReason.FINISHED), generator

    trajectory, generator = asyncio.run(run())
    said = [
        decode(sample.ids[span.start : span.stop])
        for sample in trajectory.samples
        for span in sample.spans
        if span.origin is Origin.SAMPLED
    ]
    expected = [f"<{n}><end>" for n in range(len(generator.requests))]
    assert len(said) == len(expected)
    assert all(any(whole.startswith(part) for whole in expected) for part in said)
    assert len({part.split(">")[0] for part in said if ">" in part}) == sum(">" in p for p in said)
    for sample in trajectory.samples:
        mask = [token != IMAGE for token in sample.ids]
        for placed in sample.images:
            assert placed.image is PICTURE
            assert sample.ids[placed.start : placed.stop] == (IMAGE,) * placed.num_tokens
            assert not any(sample.loss_mask[placed.start : placed.stop])
            mask[placed.start : placed.stop] = [True] * placed.num_tokens
        assert all(mask)  # no placeholder without its image
        assert len(sample.response_ids) <= max_response
    for request in generator.requests:
        assert sum(token == IMAGE for token in request.prompt) == sum(
            placed.num_tokens for placed in request.images
        )
    assert set(generator.finished_sessions) >= {
        request.context.session_id for request in generator.requests
    }
