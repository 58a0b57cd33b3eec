"""Tests of retokenization drift: what is counted, and what is shown of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import (
    AgentTask,
    Completion,
    Conversation,
    Drop,
    FinishReason,
    LoopLimits,
    LoopRegistry,
    Message,
    Origin,
    RenderError,
    Rendering,
    RolloutRunner,
    SamplingParams,
    Services,
    StopReason,
    TokenChunk,
    ToolSpec,
    Trajectory,
    Transcript,
    default_loops,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.agent_loop.tokens import retokenization_drift as drift_module
from treadle.agent_loop.tokens.retokenization_drift import (
    RecordedSample,
    RetokenizationDrift,
    measure_drift,
)

RENDERER = ByteRenderer()
END = RENDERER.stop_token_ids[0]
USER = Message(role="user", content="question")


def sample(*ids: int) -> Completion:
    chunk = TokenChunk(token_ids=ids, logprobs=(0.0,) * len(ids), weight_version=0)
    return Completion(chunks=(chunk,), finish=FinishReason.STOP)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def record(*turns: tuple[str, str], glue: str = "") -> RecordedSample:
    """A sample whose turns are sampled as the first text and read as the second."""
    transcript = Transcript(RENDERER.render([USER], tools=()).ids)
    messages = [USER]
    for index, (sampled, read) in enumerate(turns):
        if index:
            answer = RENDERER.extend(transcript.ids, [USER], tools=()).ids
            transcript.observe((*RENDERER.encode(glue), *answer))
            messages.append(USER)
        transcript.sample(sample(*RENDERER.encode(sampled), END))
        messages.append(said(read))
    return RecordedSample(tokens=transcript.freeze(), messages=tuple(messages), tools=())


def test_1_ids_that_the_template_would_write_do_not_drift() -> None:
    drift = measure_drift([record(("one", "one"), ("two", "two"))], RENDERER)
    assert drift == RetokenizationDrift(num_turns=4)


def test_2_each_turn_that_the_model_wrote_in_its_own_way_counts_once() -> None:
    drift = measure_drift(
        [record((" one ", "one"), ("two", "two"), ("three\n", "three")), record(("x", "x"))],
        RENDERER,
    )
    assert (drift.num_turns, drift.num_sampled, drift.num_observed) == (8, 2, 0)
    assert drift.num_drifted == 2
    point = drift.first
    assert point is not None
    assert (point.sample, point.turn, point.position, point.origin) == (0, 1, 11, Origin.SAMPLED)
    assert "<assistant>one" in point.expected
    assert "<assistant> one" in point.actual
    assert "turn 1 of sample 0, sampled id 11: the template writes" in str(point)


def test_3_a_boundary_that_the_template_does_not_write_is_observed_drift() -> None:
    drift = measure_drift([record(("one", "one"), ("two", "two"), glue="\n")], RENDERER)
    assert (drift.num_sampled, drift.num_observed) == (0, 1)
    assert drift.first is not None
    assert drift.first.turn == 2
    assert "one<end>\n<user>" in drift.first.actual
    assert "one<end><user>" in drift.first.expected


def test_4_the_sample_that_drifts_is_named() -> None:
    drift = measure_drift([record(("x", "x")), record(("y ", "y"))], RENDERER)
    assert drift.first is not None
    assert drift.first.sample == 1


def test_5_a_turn_that_was_cut_is_compared_as_far_as_it_goes() -> None:
    transcript = Transcript(RENDERER.render([USER], tools=()).ids)
    transcript.sample(sample(*RENDERER.encode("on")))
    cut = RecordedSample(tokens=transcript.freeze(), messages=(USER, said("on")), tools=())
    assert measure_drift([cut], RENDERER) == RetokenizationDrift(num_turns=2)
    wrong = RecordedSample(tokens=transcript.freeze(), messages=(USER, said("no")), tools=())
    assert measure_drift([wrong], RENDERER).num_sampled == 1


class _ManyEnds(ByteRenderer):
    """A renderer whose model may end a turn with another id, as Llama does with <|eom_id|>."""

    stop_token_ids = (END, 7)  # type: ignore[assignment]

    def extend(self, ids: Sequence[int], *args: Any, **kwargs: Any) -> Rendering:
        extended = super().extend((*ids[:-1], END) if ids[-1] == 7 else ids, *args, **kwargs)
        return extended


@pytest.mark.parametrize(
    ("renderer", "end"),
    [(_ManyEnds(), 7), (RENDERER, 5)],
    ids=["in the place of the template's", "before the template's"],
)
@pytest.mark.parametrize("turns", [1, 3])
def test_5b_the_id_that_ended_a_turn_is_a_boundary_and_shifts_no_other_turn(
    renderer: ByteRenderer, end: int, turns: int
) -> None:
    transcript = Transcript(renderer.render([USER], tools=()).ids)
    messages = [USER]
    for turn in range(turns):
        if turn:
            transcript.observe(renderer.extend(transcript.ids, [USER], tools=()).ids)
            messages.append(USER)
        transcript.sample(sample(*renderer.encode(f"turn {turn}"), end))
        messages.append(said(f"turn {turn}"))
    recorded = RecordedSample(tokens=transcript.freeze(), messages=tuple(messages), tools=())
    drift = measure_drift([recorded], renderer)
    assert (drift.num_sampled, drift.num_observed) == (0, turns)


def test_5c_reasoning_that_the_template_leaves_out_is_not_the_models_drift() -> None:
    transcript = Transcript(RENDERER.render([USER], tools=()).ids)
    transcript.sample(sample(*RENDERER.encode("<think>so</think>Yes."), END))
    transcript.observe(RENDERER.extend(transcript.ids, [USER], tools=()).ids)
    transcript.sample(sample(*RENDERER.encode("No."), END))

    class Drops(ByteRenderer):
        def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
            return super().render([replace(m, reasoning=None) for m in messages], tools=tools)

    turn = replace(said("Yes."), reasoning="so")
    messages = (USER, turn, USER, said("No."))
    recorded = RecordedSample(tokens=transcript.freeze(), messages=messages, tools=())
    drift = measure_drift([recorded], Drops())
    assert (drift.num_sampled, drift.num_observed) == (0, 1)
    other = replace(recorded, messages=(USER, said("Yes."), *messages[2:]))
    assert measure_drift([other], Drops()).num_sampled == 1


def test_6_messages_that_the_template_refuses_are_counted_as_unknown() -> None:
    class Refusing(ByteRenderer):
        def render(self, messages, *, tools) -> Rendering:  # type: ignore[no-untyped-def]
            raise RenderError("no")

    assert measure_drift([record(("x", "x"))], Refusing()) == RetokenizationDrift(num_unknown=1)


def test_6b_what_is_measured_is_bounded_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = record(("x ", "x"))
    monkeypatch.setattr(drift_module, "MAX_TOKENS", 2 * len(one.tokens.ids))
    drift = measure_drift([one] * 5, RENDERER)
    assert (drift.num_sampled, drift.num_unmeasured) == (2, 3)
    monkeypatch.setattr(drift_module, "MAX_TOKENS", 0)
    drift = measure_drift([one] * 2, RENDERER)
    assert (drift.num_sampled, drift.num_unmeasured) == (1, 1)


@given(
    st.lists(st.tuples(st.text("ab \n", max_size=4), st.text("ab \n", max_size=4)), min_size=1),
    st.sampled_from(["", "\n"]),
)
def test_7_exactly_the_turns_that_differ_are_counted(
    turns: list[tuple[str, str]], glue: str
) -> None:
    drift = measure_drift([record(*turns, glue=glue)], RENDERER)
    assert drift.num_turns == 2 * len(turns)
    assert drift.num_sampled == sum(sampled != read for sampled, read in turns)
    assert drift.num_observed == (len(turns) - 1) * bool(glue)
    assert (drift.first is None) == (drift.num_drifted == 0)


class AskTwice:
    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        with Conversation(task, services) as chat:
            await chat.generate()
            assert chat.answer([USER]) is None
            await chat.generate()
            return chat.finish(StopReason.FINISHED)


@pytest.mark.asyncio
async def test_8_every_run_reports_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    services = Services(
        generator=ScriptedGenerator(["one", "two", f" {call}", "three"]),
        renderer=RENDERER,
        limits=LoopLimits(max_response_tokens=200),
        sampling=SamplingParams(max_tokens=100),
    )
    loops = default_loops().adding("twice", AskTwice())
    trajectories = await _run(loops, services, count=2)
    kinds = [[finding.kind for finding in trajectory.findings] for trajectory in trajectories]
    assert kinds == [[], ["unknown_tool", "drift"]]
    sampled = [m.value for t in trajectories for m in t.metrics if m.name == "drift/sampled"]
    assert sampled == [0, 1]
    names = [metric.name for metric in trajectories[0].metrics]
    assert [n for n in names if n.startswith("drift/")] == [
        "drift/turns",
        "drift/sampled",
        "drift/observed",
        "drift/unknown_samples",
        "drift/unmeasured_samples",
    ]


class Remembering(ByteRenderer):
    """Knows what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, ...]] = []
        self.again: list[tuple[int, ...]] = []

    def render(self, *args: Any, **kwargs: Any) -> Rendering:
        made = super().render(*args, **kwargs)
        self.made.append(made.ids)
        return made

    def extend(self, *args: Any, **kwargs: Any) -> Rendering:
        made = super().extend(*args, **kwargs)
        self.made.append(made.ids)
        return made

    def render_again(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec],
        ids: Sequence[int],
        written: Sequence[tuple[int, int]],
    ) -> Rendering:
        self.again.extend(tuple(ids[start:stop]) for start, stop in written)
        return super().render(messages, tools=tools)


@pytest.mark.asyncio
async def test_9_a_renderer_is_told_what_it_wrote() -> None:
    renderer = Remembering()
    services = Services(
        generator=ScriptedGenerator(["one", " two"]),
        renderer=renderer,
        limits=LoopLimits(max_response_tokens=200),
        sampling=SamplingParams(max_tokens=100),
    )
    task = AgentTask(task_id="t", sample_index=0, rollout_index=0, loop="twice", messages=(USER,))
    with Conversation(task, services) as chat:
        await chat.generate()
        chat.answer([USER])
        await chat.generate()
        trajectory = chat.finish(StopReason.FINISHED)
    assert renderer.again == renderer.made and len(renderer.made) == 2
    assert trajectory.findings == ()


async def _run(loops: LoopRegistry, services: Services, *, count: int) -> list[Trajectory]:
    ended: list[Trajectory] = []

    async def sink(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    tasks = [
        AgentTask(task_id=f"t{i}", sample_index=i, rollout_index=0, loop="twice", messages=(USER,))
        for i in range(count)
    ]
    runner = RolloutRunner(loops, services, max_in_flight=1, deadline_s=60, failure_policy=Drop())
    report = await runner.run(tasks, sink)
    count, first = report.findings["drift"]
    assert count == 1
    assert "turn 1 of sample 0, sampled id" in first
    return ended
