"""Tests of how trajectories travel; `tests/e2e/loop_worker_test.py` has a real worker."""

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from types import ModuleType
from typing import Any

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
    RoutedExperts,
    SampleReward,
    Span,
    StopReason,
    Tokens,
    ToolCall,
    ToolError,
    Trajectory,
)
from treadle.tracing import Metric, Reduce
from treadle.trainer.rollout.workers.trajectory_frames import (
    WorkerTraceback,
    pack_trajectory,
    unpack_trajectory,
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


def sent(trajectory: Trajectory, of: AgentTask, known: dict[Image, Image]) -> Trajectory:
    """Returns what arrives; the worker has copies of the driver's objects, and the other way."""
    given = pickle.loads(pickle.dumps(of))
    packed = pickle.dumps(pack_trajectory(replace(trajectory, task=given), given), protocol=5)
    return unpack_trajectory(pickle.loads(packed), of, known)


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
    head, frames = pack_trajectory(ended(of, num_turns=3), of)
    found = [bytes(frame) for frame in frames]
    assert SHOWN.data not in found
    assert found.count(ZOOMED.data) == 1, "of four places"
    assert SHOWN.data not in head
    assert ZOOMED.data not in head
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
        packed = pickle.dumps(pack_trajectory(ended(of, part=part), of), protocol=5)
        gc.collect()
        before = len(gc.get_objects())
        arrived = unpack_trajectory(pickle.loads(packed), of, known)
        assert len(arrived.tokens.ids) == 3 * part
        return len(gc.get_objects()) - before

    count(4)  # caches
    assert count(10_000) < count(4) + _OTHERS
    small, large = (
        len(pack_trajectory(ended(task(), part=part), task())[0]) for part in (4, 10_000)
    )
    assert large - small < 100, "bytes that are no memory of arrays"
    _, (ids, logprobs, *_) = pack_trajectory(ended(task(), part=10_000), task())
    assert [memoryview(frame).nbytes for frame in (ids, logprobs)] == [3 * 40_000, 40_000]


_TEXTS = st.text(st.characters(), max_size=4)  # with halves of surrogate pairs
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=2),
    max_leaves=4,
)
_CALLS = st.builds(
    ToolCall, id=_TEXTS, name=_TEXTS, arguments=st.dictionaries(_TEXTS, _VALUES, max_size=2)
)
_IMAGES = st.lists(st.sampled_from([SHOWN, ZOOMED]), max_size=2).map(tuple)
_MESSAGES = st.one_of(
    st.builds(
        Message,
        role=st.just("assistant"),
        content=_TEXTS,
        tool_calls=st.lists(_CALLS, max_size=2).map(tuple),
        reasoning=st.none() | _TEXTS,
    ),
    st.builds(
        Message,
        role=st.just("tool"),
        content=_TEXTS,
        tool_call_id=st.none() | _TEXTS,
        name=st.none() | _TEXTS,
        images=_IMAGES,
    ),
    st.builds(Message, role=st.just("user"), content=_TEXTS, images=_IMAGES),
)


@st.composite
def _samples(draw: st.DrawFn) -> Tokens:
    versions = st.none() | st.sampled_from([-1, 0, 7, 2**32 - 2, 2**40])
    spans, stop = [], 0
    for origin in draw(st.lists(st.sampled_from(Origin), max_size=5)):
        start, stop = stop, stop + draw(st.integers(1, 3))
        spans.append(Span(origin=origin, start=start, stop=stop, weight_version=draw(versions)))
    floats = st.floats(width=32, allow_nan=False)
    logprobs = draw(st.lists(st.just(0.0) | floats, min_size=stop, max_size=stop))
    return Tokens(ids=range(stop), logprobs=logprobs, spans=tuple(spans))


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
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pickle_2": lambda t: pickle.loads(pickle.dumps(t, protocol=2)),
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
    assert not any(_made(pickle.loads(pickle.dumps(arrived))))
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
        packed = pickle.dumps(pack_trajectory(ended(of, num_turns=num_turns), of), protocol=5)
        gc.collect()
        before = len(gc.get_objects())
        arrived = unpack_trajectory(pickle.loads(packed), of, known)
        assert len(_numbers(arrived)) == 3
        return len(gc.get_objects()) - before

    for num_turns in (1, 100):
        count(num_turns)  # caches
    assert count(100) < count(1) + _OTHERS


@pytest.mark.parametrize("value", [2, 2.0, True, -0.5, 2**70, Fraction(1, 2)])
def test_a_count_that_many_trajectories_have_is_one_object(value: float) -> None:
    metrics = (Metric("tool/calls", value, Reduce.SUM), Metric("search/hits", 0.0))
    of, known = task(), dict[Image, Image]()
    one, other = (sent(replace(ended(of), metrics=metrics), of, known) for _ in range(2))
    assert one.metrics == other.metrics == metrics
    assert type(one.metrics[0].value) is type(value)
    assert one.exchange is other.exchange
    shared = not isinstance(value, Fraction)
    assert [a is b for a, b in zip(one.metrics, other.metrics, strict=True)] == [shared] * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated(Message):
    note: str


def test_what_a_users_class_adds_arrives_too() -> None:
    whole = ended(task())
    annotated = replace(
        whole, messages=(*whole.messages, Annotated(role="user", content="", note="of mine"))
    )
    assert sent(annotated, task(), {}) == annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(Trajectory):
    pass


def test_a_trajectory_of_another_class_fails_alone() -> None:
    own = Own(task=task(), samples=(), messages=(), stop=StopReason.FINISHED)
    error = unpack_trajectory(pack_trajectory(own, task()), task(), {}).error
    assert isinstance(error, LoopError)
    assert "it is a Own, and must be a Trajectory" in str(error)


class OwnError(ToolError):
    """Of a module that the driver need not have."""


def test_an_error_of_the_users_own_travels_as_its_base_with_its_traceback() -> None:
    error = OwnError("it is down")
    error.tool = "lookup"
    packed = pack_trajectory(Trajectory.failed(task(0), error), task(0))
    arrived = unpack_trajectory(packed, task(0), {}).error
    assert type(arrived) is ToolError
    assert (str(arrived), arrived.tool, arrived.retryable) == (
        "OwnError: it is down",
        "lookup",
        True,
    )
    assert isinstance(arrived.__cause__, WorkerTraceback)
    assert "OwnError: it is down" in str(arrived.__cause__)


def test_what_the_driver_has_no_class_for_fails_its_trajectory_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("of_the_user")
    kind = type("Place", (), {"__module__": module.__name__})
    vars(module)["Place"] = kind
    call = ToolCall(id="call_0", name="go", arguments={"to": kind()})
    answer = Message(role="assistant", content="", tool_calls=(call,))
    with monkeypatch.context() as in_the_worker:
        in_the_worker.setitem(sys.modules, module.__name__, module)
        packed = pack_trajectory(replace(ended(task()), messages=(answer,)), task())
    arrived = unpack_trajectory(packed, task(), {})
    assert isinstance(arrived.error, LoopError)
    assert "cannot be read by the driver: ModuleNotFoundError: No module named 'of_the_user'" in (
        str(arrived.error)
    )
    assert arrived.task == task()


def test_what_cannot_be_pickled_fails_its_trajectory_only() -> None:
    odd = replace(task(0), fields={"odd": lambda: 0})  # a loop may return another task
    arrived = unpack_trajectory(pack_trajectory(ended(odd), task(0)), task(0), {})
    assert isinstance(arrived.error, LoopError)
    assert "cannot be pickled" in str(arrived.error)
    assert arrived.task == task(0)
    assert arrived.messages == task(0).messages
