"""Tests of the values' own checks, the error boundary and the seeds."""

import asyncio
from dataclasses import replace

import pytest

from treadle.agent_loop import (
    AgentTask,
    Image,
    LoopLimits,
    Message,
    OverloadedError,
    RequestContext,
    SampleReward,
    SamplingParams,
    Services,
    SetupError,
    StopReason,
    TokenChunk,
    Tokens,
    ToolCall,
    ToolError,
    Trajectory,
    boundary,
    derive_seed,
)
from treadle.agent_loop.testing import ByteRenderer, EchoGenerator, ScriptedTool

TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="tool_agent",
    messages=(Message(role="user", content="hi"),),
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k is -1; it must be at least 1, or None for all"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_sampling_out_of_range_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SamplingParams(max_tokens=1), **change)  # type: ignore[arg-type]


def test_messages_that_make_no_sense_are_refused() -> None:
    call = ToolCall(id="c", name="f", arguments={})
    with pytest.raises(ValueError, match="role is 'robot'"):
        Message(role="robot", content="")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a user message cannot carry tool calls"):
        Message(role="user", content="", tool_calls=(call,))
    with pytest.raises(ValueError, match="cannot answer a tool call"):
        Message(role="user", content="", tool_call_id="c")
    with pytest.raises(ValueError, match="task 't' has no message"):
        replace(TASK, messages=())


def test_chunks_and_requests_are_checked() -> None:
    with pytest.raises(ValueError, match="2 tokens has 1 logprobs"):
        TokenChunk(token_ids=(1, 2), logprobs=(0.0,), weight_version=0)
    with pytest.raises(ValueError, match="at least one token"):
        TokenChunk(token_ids=(), logprobs=(), weight_version=0)
    with pytest.raises(ValueError, match="request_id has 129 bytes"):
        RequestContext(request_id="x" * 129, session_id="s", deadline=0.0)


def test_error_and_stop_go_together() -> None:
    good = Trajectory(task=TASK, samples=(), messages=(), stop=StopReason.FINISHED)
    assert good.final_text == ""
    with pytest.raises(ValueError, match="contradict"):
        replace(good, stop=StopReason.ERROR)
    with pytest.raises(ValueError, match="contradict"):
        replace(good, error=OverloadedError("full"))


def test_tools_are_filed_under_their_own_names() -> None:
    with pytest.raises(ValueError, match="tool 'lookup' has the key 'search'"):
        Services(
            generator=EchoGenerator(),
            renderer=ByteRenderer(),
            limits=LoopLimits(max_response_tokens=1),
            sampling=SamplingParams(max_tokens=1),
            tools={"search": ScriptedTool("lookup")},
        )


def test_a_boundary_translates_what_is_foreign_and_nothing_else() -> None:
    with (
        pytest.raises(ToolError, match="the tool: KeyError: 'x'") as caught,
        boundary(ToolError, "the tool"),
    ):
        raise KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)
    for own in (OverloadedError("full"), SetupError("no"), asyncio.CancelledError()):
        with pytest.raises(type(own)) as passed, boundary(ToolError, "the tool"):
            raise own
        assert passed.value is own


def test_seeds_are_pinned_and_differ_with_every_part() -> None:
    assert derive_seed(1, "a", 2) == PINNED
    assert len({derive_seed(1, 2), derive_seed(12), derive_seed("1", 2), derive_seed(2, 1)}) == 4
    assert all(0 <= derive_seed(i) < 2**63 for i in range(1000))


PINNED = 751158407608295134


def test_images_stand_where_their_marks_are_or_come_first() -> None:
    one, two = (Image(data=data, mime="image/png") for data in (b"1", b"2"))
    marked = Message(role="user", content="a<image>b<image>", images=(one, two))
    assert marked.parts == ("a", one, "b", two)
    assert Message(role="user", content="<image>", images=(one,)).parts == (one,)
    assert Message(role="user", content="text", images=(one, two)).parts == (one, two, "text")
    assert Message(role="user", content="", images=(one,)).parts == (one,)
    assert Message(role="user", content="<image>").parts == ("<image>",)
    assert Message(role="user", content="").parts == ()


@pytest.mark.parametrize("content", ["<image>", "<image><image><image>"])
def test_another_number_of_marks_than_images_is_refused(content: str) -> None:
    images = (Image(data=b"1", mime="image/png"),) * 2
    with pytest.raises(ValueError, match=r"the text has \d <image> marks for 2 images; write one"):
        Message(role="user", content=content, images=images)


@pytest.mark.parametrize(
    ("data", "mime", "text"),
    [
        (b"", "image/png", "has no bytes"),
        (b"1", "image/gif", "mime is 'image/gif'; it must be one of image/png, image/jpeg"),
        (b"1", "video/mp4", "video is not supported: give single frames"),
    ],
)
def test_what_is_no_image_is_refused(data: bytes, mime: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Image(data=data, mime=mime)


def test_a_model_samples_no_image() -> None:
    with pytest.raises(ValueError, match="an assistant message cannot carry images"):
        Message(role="assistant", content="", images=(Image(data=b"1", mime="image/png"),))


def _players(*given: tuple[str, float], reward: float | None = 0.0) -> Trajectory:
    return Trajectory(
        task=TASK,
        samples=(Tokens.empty(),) * len(given),
        messages=(),
        stop=StopReason.FINISHED,
        reward=reward,
        sample_rewards=tuple(SampleReward(player=p, value=v) for p, v in given),
    )


def test_samples_may_have_rewards_of_players() -> None:
    game = _players(("0", 1.0), ("0", 1.0), ("1", -1.0))
    assert [each.value for each in game.sample_rewards] == [1.0, 1.0, -1.0]
    with pytest.raises(ValueError, match="1 sample_rewards for 3 samples"):
        replace(game, sample_rewards=game.sample_rewards[:1])
    with pytest.raises(ValueError, match="need a reward of the trajectory"):
        _players(("0", 1.0), reward=None)
    for wrong in ((("0", 1.0), ("1", 0.0), ("0", 1.0)), (("0", 1.0), ("0", 0.5))):
        with pytest.raises(ValueError, match="must be adjacent and have one reward, got '0': 1"):
            _players(*wrong)
    with pytest.raises(ValueError, match="must be a finite number"):
        SampleReward(player="0", value=float("nan"))
