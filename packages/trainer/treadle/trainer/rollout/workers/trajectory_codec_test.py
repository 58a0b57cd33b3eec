"""Tests of how trajectories travel; `tests/e2e/loop_worker_test.py` has a real worker."""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import (
    AgentTask,
    Finding,
    Image,
    LoopError,
    Message,
    Origin,
    PlacedImage,
    RolloutError,
    RoutedExperts,
    SampleReward,
    Span,
    StopReason,
    Tokens,
    ToolCall,
    ToolError,
    Trajectory,
    errors,
)
from treadle.loop_worker.v1 import trajectory_pb2 as pb
from treadle.tracing import Metric, Reduce
from treadle.trainer.rollout.workers.testing import PLAIN, TEXTS, shown
from treadle.trainer.rollout.workers.trajectory_codec import (
    ImageNumbers,
    WorkerLostError,
    WorkerTraceback,
    pack_task,
    pack_trajectory,
    read_task,
    read_trajectory,
    write_trajectory,
)

SHOWN = Image(data=b"shown" * 1000, mime="image/png")
ZOOMED = Image(data=b"zoomed" * 1000, mime="image/jpeg")


def task(index: int = 0, *images: Image) -> AgentTask:
    return AgentTask(
        task_id="train/0",
        sample_index=0,
        rollout_index=index,
        loop="loop",
        messages=(Message(role="user", content="hi", images=images),),
        fields={"reward_model": {"ground_truth": "1"}},
        seed=index,
    )


def ended(of: AgentTask, *, num_turns: int = 1, part: int = 4, **changes: Any) -> Trajectory:
    """Returns a trajectory whose turns call a tool that shows an image."""
    messages, spans = list(of.messages), [Span(origin=Origin.PROMPT, start=0, stop=part)]
    for turn in range(num_turns):
        call = ToolCall(id=f"call_{turn}", name="zoom", arguments={"to": [turn]})
        messages += [
            Message(role="assistant", content="", tool_calls=(call,), reasoning="so"),
            Message(role="tool", content="it", tool_call_id=call.id, name="zoom", images=(ZOOMED,)),
        ]
        for origin, version in ((Origin.SAMPLED, 3 + turn), (Origin.OBSERVED, None)):
            start = spans[-1].stop
            spans.append(
                Span(origin=origin, start=start, stop=start + part, weight_version=version)
            )
    length = spans[-1].stop
    placed = (
        *(PlacedImage(image=image, start=0, num_tokens=1) for image in of.messages[0].images),
        PlacedImage(image=ZOOMED, start=2 * part, num_tokens=part),
    )
    logprobs = [-token / 8 if token // part % 2 else 0.0 for token in range(length)]
    values: dict[str, Any] = {"logprobs": logprobs}
    tokens = Tokens(ids=range(length), spans=tuple(spans), images=placed, **(values | changes))
    return Trajectory(
        task=of,
        samples=(tokens,),
        messages=tuple(messages),
        stop=StopReason.USER_TURNS,
        assistant_turns=num_turns,
        user_turns=num_turns,
        reward=0.5,
        sample_rewards=(SampleReward(player="first", value=0.5),),
        answer="1",
        tool_rewards=(1.0,),
        turn_scores=(0.25,),
        metrics=(Metric("tool/calls", num_turns, Reduce.SUM),),
        findings=(Finding(kind="drift", text="here"),),
    )


def given_to_a_worker(of: AgentTask) -> AgentTask:
    """Returns the worker's copy of a task."""
    images = ImageNumbers()
    packed = pack_task(of, images).SerializeToString()
    message = pb.Trajectory()
    images.write_new(message.images)
    copies = [Image(data=image.data, mime=image.mime) for image in message.images]
    return read_task(pb.AgentTask.FromString(packed), copies)


def on_the_wire(packed: pb.Trajectory) -> pb.Trajectory:
    return pb.Trajectory.FromString(packed.SerializeToString())


def sent(trajectory: Trajectory, of: AgentTask, known: dict[Image, Image]) -> Trajectory:
    """Returns what arrives; the worker has copies of the driver's objects, and the other way."""
    given = given_to_a_worker(of)
    packed = pack_trajectory(replace(trajectory, task=given), given)
    return read_trajectory(on_the_wire(packed), of, known)


def test_a_trajectory_arrives_as_it_was() -> None:
    experts = RoutedExperts(first=0, num_layers=1, top_k=2, id_bytes=1, data=bytes(range(24)))
    whole = ended(task(0, SHOWN), routed_experts=experts)
    assert sent(whole, task(0, SHOWN), {}) == whole
    everywhere = ended(task(), logprobs=[-0.5] * 12)
    assert sent(everywhere, task(), {}) == everywhere
    several = replace(whole, samples=whole.samples * 2, sample_rewards=(), messages=())
    assert sent(several, task(0, SHOWN), {}) == several
    bare = replace(whole, samples=(), messages=whole.task.messages, sample_rewards=())
    assert sent(bare, task(0, SHOWN), {}) == bare


def test_of_the_images_only_what_the_task_has_not_travels_and_a_group_has_one_copy() -> None:
    of, known = task(0, SHOWN), dict[Image, Image]()
    packed = pack_trajectory(ended(of, num_turns=3), of)
    assert [image.data for image in packed.images] == [ZOOMED.data], "of four places"
    packed.ClearField("images")
    assert len(packed.SerializeToString()) < len(ZOOMED.data)
    group = [sent(ended(task(i, SHOWN), num_turns=2), task(i, SHOWN), known) for i in range(3)]
    assert all(t.tokens.images[0].image is SHOWN for t in group)
    shown = [image for t in group for message in t.messages[1:] for image in message.images]
    shown += [t.tokens.images[1].image for t in group]
    assert len(shown) == 9
    assert {id(image) for image in shown} == {id(known[ZOOMED])}


_OTHERS = 20
"""Objects that other threads of the process and caches may make meanwhile."""


def test_a_token_is_no_object_in_the_driver() -> None:
    def count(part: int) -> int:
        of, known = task(), dict[Image, Image]()
        packed = pack_trajectory(ended(of, part=part), of).SerializeToString()
        gc.collect()
        before = len(gc.get_objects())
        arrived = read_trajectory(pb.Trajectory.FromString(packed), of, known)
        assert len(arrived.tokens.ids) == 3 * part
        return len(gc.get_objects()) - before

    count(4)  # caches
    assert count(10_000) < count(4) + _OTHERS
    [sample] = pack_trajectory(ended(task(), part=10_000), task()).samples
    assert (len(sample.ids), len(sample.logprobs)) == (3 * 40_000, 40_000)


_CALLS = st.builds(
    ToolCall, id=TEXTS, name=TEXTS, arguments=st.dictionaries(TEXTS, PLAIN, max_size=2)
)
_IMAGES = st.lists(st.sampled_from([SHOWN, ZOOMED]), max_size=2).map(tuple)
_MESSAGES = st.one_of(
    st.builds(
        Message,
        role=st.just("assistant"),
        content=TEXTS,
        tool_calls=st.lists(_CALLS, max_size=2).map(tuple),
        reasoning=st.none() | TEXTS,
    ),
    st.builds(
        Message,
        role=st.just("tool"),
        content=TEXTS,
        tool_call_id=st.none() | TEXTS,
        name=st.none() | TEXTS,
        images=_IMAGES,
    ),
    st.builds(Message, role=st.just("user"), content=TEXTS, images=_IMAGES),
)


@st.composite
def _samples(draw: st.DrawFn) -> Tokens:
    versions = st.none() | st.sampled_from([0, 7, 2**32 - 2])
    spans, stop = [], 0
    for origin in draw(st.lists(st.sampled_from(Origin), max_size=5)):
        start, stop = stop, stop + draw(st.integers(1, 3))
        spans.append(Span(origin=origin, start=start, stop=stop, weight_version=draw(versions)))
    numbers = st.just(0.0) | st.floats(width=32, allow_nan=False)  # NaN equals nothing
    logprobs = draw(st.lists(numbers, min_size=stop, max_size=stop))
    placed = st.builds(
        PlacedImage,
        image=st.sampled_from([SHOWN, ZOOMED]),
        start=st.integers(0, 2**40),
        num_tokens=st.integers(1, 2**40),
    )
    experts = st.builds(
        RoutedExperts,
        first=st.integers(0, 2**40),
        num_layers=st.just(2),
        top_k=st.integers(1, 3),
        id_bytes=st.just(1),
        data=st.sampled_from([b"", bytes(range(12))]),
    )
    return Tokens(
        ids=range(stop),
        logprobs=logprobs,
        spans=tuple(spans),
        images=tuple(draw(st.lists(placed, max_size=2))),
        routed_experts=draw(st.none() | experts),
        sampling_masks=draw(st.sampled_from([(), (b"\x00", b"", b"\x05") * stop]))[:stop],
    )


_NUMBERS = st.floats(allow_nan=False, min_value=-1e100, max_value=1e100)
_OTHER_FIELDS = st.fixed_dictionaries(
    {
        "stop": st.sampled_from(
            [reason for reason in StopReason if reason is not StopReason.ERROR]
        ),
        "assistant_turns": st.integers(0, 2**32 - 1),
        "user_turns": st.integers(0, 3),
        "reward": st.none() | _NUMBERS,
        "answer": st.none() | TEXTS,
        "tool_rewards": st.lists(st.floats(), max_size=2).map(tuple),
        "turn_scores": st.lists(st.floats(), max_size=2).map(tuple),
        "metrics": st.lists(
            st.builds(
                Metric,
                TEXTS,
                st.floats() | st.integers() | st.booleans(),
                st.sampled_from(Reduce),
            ),
            max_size=2,
        ).map(tuple),
        "findings": st.lists(st.builds(Finding, kind=TEXTS, text=TEXTS), max_size=2).map(tuple),
    }
)
_TASKS = st.builds(
    AgentTask,
    task_id=TEXTS,
    sample_index=st.integers(-1, 2**40),
    rollout_index=st.integers(-1, 2**40),
    loop=TEXTS,
    messages=st.lists(_MESSAGES, min_size=1, max_size=3).map(tuple),
    fields=st.dictionaries(TEXTS, PLAIN, max_size=2),
    seed=st.none() | st.integers(0, 2**64 - 1),
)


@settings(max_examples=80, deadline=None)
@given(
    of=_TASKS,
    other=st.none() | _TASKS,
    keeps=st.booleans(),
    messages=st.lists(_MESSAGES, max_size=3),
    samples=st.lists(_samples(), max_size=2),
    rewarded=st.booleans(),
    fields=_OTHER_FIELDS,
)
def test_every_field_of_a_trajectory_and_of_its_task_arrives(
    of: AgentTask,
    other: AgentTask | None,
    keeps: bool,
    messages: list[Message],
    samples: list[Tokens],
    rewarded: bool,
    fields: dict[str, Any],
) -> None:
    given = given_to_a_worker(of)
    assert shown(given) == shown(of)
    if rewarded and fields["reward"] is not None:
        each = SampleReward(player="first", value=fields["reward"])
        fields["sample_rewards"] = (each,) * len(samples)
    whole = Trajectory(
        task=given if other is None else other,
        samples=tuple(samples),
        messages=(*(given.messages if keeps else ()), *messages),
        **fields,
    )
    arrived = read_trajectory(on_the_wire(write_trajectory(whole, given)), of, {})
    assert shown(arrived) == shown(whole)
    again = read_trajectory(on_the_wire(write_trajectory(arrived, arrived.task)), arrived.task, {})
    assert shown(again) == shown(whole)


_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RolloutError)
]


@given(
    kind=st.sampled_from([*_ERRORS, WorkerLostError]),
    text=TEXTS,
    tool=st.none() | TEXTS,
    notes=st.lists(TEXTS, max_size=2),
    retryable=st.booleans(),
)
def test_every_error_arrives(
    kind: type[RolloutError], text: str, tool: str | None, notes: list[str], retryable: bool
) -> None:
    error = kind(text)
    error.retryable = retryable
    if tool is not None:
        vars(error)["tool"] = tool
    for note in notes:
        error.add_note(note)
    arrived = sent(Trajectory.failed(task(), error), task(), {}).error
    assert type(arrived) is kind
    assert arrived.args == error.args
    assert vars(arrived) == vars(error)
    assert isinstance(arrived.__cause__, WorkerTraceback)


def _made(trajectory: Trajectory) -> list[bool]:
    """Returns which messages and spans of those that came as bytes somebody has read."""
    sources = [trajectory.source, *(sample.source for sample in trajectory.samples)]
    return [source.is_made for source in sources if source is not None]


def _numbers(trajectory: Trajectory) -> list[object]:
    """Returns what the driver asks of every trajectory."""
    return [
        trajectory.exchange,
        *(
            (tuple(t.loss_mask), t.num_prompt_tokens, t.num_sampled_tokens, t.weight_versions)
            for t in trajectory.samples
        ),
        *(tuple(sample.runs()) for sample in trajectory.samples),
    ]


_READ: dict[str, Callable[[Trajectory], object]] = {
    "messages": lambda t: t.messages,
    "spans": lambda t: [sample.spans for sample in t.samples],
    "final_text": lambda t: t.final_text,
    "numbers": _numbers,
    "repr": repr,
    "packed again": lambda t: read_trajectory(write_trajectory(t, t.task), t.task, {}),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": lambda t: replace(t, answer="another"),
    "replaced": lambda t: t.replaced(answer="another"),
    "self": lambda t: t,
}


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(_MESSAGES, max_size=5),
    samples=st.lists(_samples(), max_size=2),
    keeps=st.booleans(),
    order=st.permutations(list(_READ)),
)
def test_what_is_made_late_is_what_would_be_made_at_once(
    messages: list[Message], samples: list[Tokens], keeps: bool, order: list[str]
) -> None:
    of, known = task(0, SHOWN), dict[Image, Image]()
    whole = Trajectory(
        task=of,
        samples=tuple(samples),
        messages=(*(of.messages if keeps else ()), *messages),
        stop=StopReason.FINISHED,
    )
    arrived = sent(whole, of, known)
    assert arrived.source is not None
    assert _numbers(arrived) == _numbers(whole)
    assert not any(_made(arrived))
    assert not any(_made(read_trajectory(write_trajectory(arrived, of), of, known)))
    assert not any(_made(arrived.replaced(reward=1.0)))
    for name in order:
        assert _READ[name](arrived) == _READ[name](whole), name
    assert arrived.messages is arrived.messages
    assert type(arrived.messages) is tuple
    assert (arrived == whole) is (whole == arrived) is True
    assert arrived != replace(whole, answer="another")
    shown = {id(image) for message in arrived.messages for image in message.images}
    assert shown <= {id(SHOWN), id(known.get(ZOOMED))}


def test_what_arrived_late_is_as_frozen_and_has_no_other_fields() -> None:
    arrived = sent(ended(task()), task(), {})
    with pytest.raises(AttributeError, match="cannot assign to field 'messages'"):
        arrived.messages = ()  # type: ignore[misc]
    with pytest.raises(AttributeError, match="has no attribute 'message'"):
        arrived.message  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(TypeError, match="no field rewards"):
        arrived.replaced(rewards=1.0)
    with pytest.raises(ValueError, match="must be a finite number"):
        arrived.replaced(reward=float("nan"))


def test_a_turn_is_no_object_in_the_driver() -> None:
    def count(num_turns: int) -> int:
        of, known = task(), dict[Image, Image]()
        packed = pack_trajectory(ended(of, num_turns=num_turns), of).SerializeToString()
        gc.collect()
        before = len(gc.get_objects())
        arrived = read_trajectory(pb.Trajectory.FromString(packed), of, known)
        assert len(_numbers(arrived)) == 3
        return len(gc.get_objects()) - before

    for num_turns in (1, 100):
        count(num_turns)  # caches
    assert count(100) < count(1) + _OTHERS


@pytest.mark.parametrize("value", [2, 2.0, True, -0.5, 2**70])
def test_a_count_that_many_trajectories_have_is_one_object(value: float) -> None:
    metrics = (Metric("tool/calls", value, Reduce.SUM), Metric("search/hits", 0.0))
    of, known = task(), dict[Image, Image]()
    one, other = (sent(replace(ended(of), metrics=metrics), of, known) for _ in range(2))
    assert one.metrics == other.metrics == metrics
    assert type(one.metrics[0].value) is type(value)
    assert one.exchange is other.exchange
    assert all(a is b for a, b in zip(one.metrics, other.metrics, strict=True))


def test_a_number_of_numpy_arrives_as_a_float() -> None:
    half = cast(float, np.float32(0.5))
    whole = replace(
        ended(task()),
        tool_rewards=(half,),
        metrics=(Metric("score", half),),
    )
    arrived = sent(whole, task(), {})
    assert arrived == whole
    numbers = (*arrived.tool_rewards, arrived.metrics[0].value)
    assert [type(each) for each in numbers] == [float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated(Message):
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(Trajectory):
    pass


class OwnError(ToolError):
    """Of a module that the driver need not have."""


def test_an_error_of_the_users_own_travels_as_its_base_with_its_traceback() -> None:
    error = OwnError("it is down")
    error.tool = "lookup"
    arrived = sent(Trajectory.failed(task(0), error), task(0), {}).error
    assert type(arrived) is ToolError
    assert (str(arrived), arrived.tool, arrived.retryable) == (
        "OwnError: it is down",
        "lookup",
        True,
    )
    assert isinstance(arrived.__cause__, WorkerTraceback)
    assert "OwnError: it is down" in str(arrived.__cause__)


def calling(arguments: Any) -> Trajectory:
    call = ToolCall(id="call_0", name="go", arguments=arguments)
    answer = Message(role="assistant", content="", tool_calls=(call,))
    return replace(ended(task()), messages=(answer,))


ODD = object()
BEYOND = Span(origin=Origin.SAMPLED, start=0, stop=1, weight_version=2**40)


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (
            calling({"to": [ODD]}),
            "messages[0].tool_calls.arguments['to'][0] is of type builtins.object; return plain",
        ),
        (
            replace(ended(task()), task=replace(task(0), fields={"odd": {1: ODD}})),
            "fields['odd'][1] is of type builtins.object; return plain data",
        ),
        (replace(ended(task()), answer=ODD), "answer is of type builtins.object; return plain"),  # type: ignore[arg-type]
        (
            replace(ended(task()), metrics=(Metric("a", cast(float, ODD)),)),
            "metrics[1][0] is of type builtins.object; return plain data",
        ),
        (
            replace(ended(task()), messages=(Annotated(role="user", content="", note="mine"),)),
            "a message is a Annotated, and must be a Message",
        ),
        (
            Own(task=task(), samples=(), messages=(), stop=StopReason.FINISHED),
            "it is a Own, and must be a Trajectory",
        ),
        (
            replace(
                ended(task()),
                samples=(Tokens(ids=(1,), logprobs=(0.0,), spans=(BEYOND,)),),
                sample_rewards=(),
            ),
            "weight version beyond 32 bits",
        ),
    ],
)
def test_what_cannot_travel_fails_its_trajectory_only(odd: Trajectory, told: str) -> None:
    arrived = read_trajectory(on_the_wire(pack_trajectory(odd, task(0))), task(0), {})
    assert isinstance(arrived.error, LoopError)
    assert "its trajectory cannot leave the loop worker: " in str(arrived.error)
    assert told in str(arrived.error)
    assert arrived.task == task(0)
    assert arrived.messages == task(0).messages
