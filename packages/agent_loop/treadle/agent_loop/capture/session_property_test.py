"""Captured sessions under any agent: whatever it does with its history, and whenever.

A state machine plays the agent. It keeps the histories it has seen, edits them, and has several
requests under way; the machine also decides in which order they end, fail or are cancelled.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from treadle.agent_loop import (
    AgentTask,
    Completion,
    EngineFailedError,
    LoopLimits,
    Message,
    Origin,
    PlacedImage,
    RequestContext,
    SamplingParams,
    Services,
    ToolCall,
    ToolSpec,
)
from treadle.agent_loop.capture import CapturedSession, CapturedTurn
from treadle.agent_loop.testing import ByteRenderer, reply

TOOLS = (ToolSpec(name="f", description="F."),)
RENDERER = ByteRenderer()


@dataclass(eq=False)
class Call:
    """A request that waits for the machine to end it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    answer: asyncio.Future[Completion]


class HeldGenerator:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        call = Call(tuple(prompt), params, asyncio.get_running_loop().create_future())
        self.calls.append(call)
        try:
            return await call.answer
        finally:
            self.calls.remove(call)

    def finish_session(self, session_id: str) -> None:
        pass


@dataclass(eq=False)
class Request:
    """A request of the agent, under way."""

    messages: tuple[Message, ...]
    call: Call
    task: asyncio.Task[CapturedTurn]


def edited(history: tuple[Message, ...], kind: str, place: int) -> tuple[Message, ...]:
    """A history as an agent may send it back."""
    place %= len(history)
    message = history[place]
    match kind:
        case "cut":
            return history[: place + 1]
        case "drop":
            return history[:place] + history[place + 1 :]
        case "rewrite" if message.role == "assistant":
            calls = tuple(
                replace(call, arguments=dict(reversed(list(call.arguments.items()))))
                for call in message.tool_calls
            )
            new = replace(message, content=message.content.strip(), tool_calls=calls)
            return (*history[:place], new, *history[place + 1 :])
        case "edit":
            new = replace(message, content=message.content + "!")
            return (*history[:place], new, *history[place + 1 :])
        case "summarise":
            return (Message(role="user", content=f"summary of {place}"), *history[place + 1 :])
        case _:
            return history


def roles_in(ids: Sequence[int]) -> list[str]:
    """What the marks of `ByteRenderer` say about a prompt."""
    return re.findall("<(system|user|assistant|tool|end)>", RENDERER.decode(ids))


def roles_of(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[str]:
    """What they should say."""
    roles = ["system"] * bool(tools) + [message.role for message in messages]
    return [mark for role in roles for mark in (role, "end")] + ["assistant"]


class AnyAgent(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.generator = HeldGenerator()
        services = Services(
            generator=self.generator,
            renderer=RENDERER,
            limits=LoopLimits(max_response_tokens=400),
            sampling=SamplingParams(max_tokens=60),
        )
        first = Message(role="user", content="q")
        task = AgentTask(task_id="t", sample_index=0, rollout_index=0, loop="x", messages=(first,))
        self.session = CapturedSession(task, services)
        self.histories: list[tuple[Message, ...]] = [(first,)]
        self.requests: list[Request] = []
        self.written: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.serial = 0

    @rule(
        which=st.sampled_from([0, 0, 1, 2, 5]),
        kind=st.sampled_from(["as it was"] * 3 + ["cut", "drop", "rewrite", "edit", "summarise"]),
        place=st.integers(0, 9),
        tools=st.sampled_from([TOOLS, TOOLS, TOOLS, ()]),
        max_tokens=st.sampled_from([None, None, 3]),
        stop=st.sampled_from([(), ("end",)]),
        times=st.sampled_from([1, 1, 2]),
    )
    def ask(
        self,
        which: int,
        kind: str,
        place: int,
        tools: tuple[ToolSpec, ...],
        max_tokens: int | None,
        stop: tuple[str, ...],
        times: int,
    ) -> None:
        messages = edited(self.histories[-1 - which % len(self.histories)], kind, place)
        if not messages or messages[-1].role == "assistant":
            messages = (*messages, Message(role="user", content=f"and {place % 2}?"))

        async def begin() -> None:
            before = len(self.generator.calls)
            task = asyncio.create_task(
                self.session.complete(messages, tools=tools, max_tokens=max_tokens, stop=stop)
            )
            await asyncio.sleep(0)
            if len(self.generator.calls) == before:  # a limit forbids it
                await asyncio.wait([task])
                assert task.exception() is not None
            else:
                call = self.generator.calls[-1]
                assert roles_in(call.prompt) == roles_of(messages, tools)
                self.requests.append(Request(messages, call, task))

        for _ in range(times):
            self.runner.run(begin())

    @rule(which=st.integers(0, 9), shape=st.sampled_from(["text", "spaced", "call", "cut", "end"]))
    def answer(self, which: int, shape: str) -> None:
        if not self.requests:
            return
        request = self.requests.pop(which % len(self.requests))
        self.serial += 1
        text = {
            "text": f"t{self.serial}",
            "spaced": f" t{self.serial}\n",
            "call": f'<tool_call>\n{{"name": "f", "arguments": {{"b": {self.serial}, "a": 1}}}}\n'
            "</tool_call>",
            "cut": f"t{self.serial}",
            "end": f"t{self.serial} end of it",
        }[shape]
        ids = RENDERER.encode(text)
        if shape != "cut":
            ids = (*ids, *RENDERER.stop_token_ids)
        completion = reply(ids, request.call.params, version=self.serial)

        async def end() -> CapturedTurn:
            request.call.answer.set_result(completion)
            return await request.task

        turn = self.runner.run(end())
        assert turn.completion.token_ids == completion.token_ids[: turn.completion.num_tokens]
        self.written[self.serial] = (request.call.prompt, turn.completion.token_ids)
        self.histories.append((*request.messages, turn.parsed.message))
        answers = [_answer(call) for call in turn.parsed.message.tool_calls]
        if answers:
            self.histories.append((*request.messages, turn.parsed.message, *answers))

    @rule(which=st.integers(0, 9), how=st.sampled_from(["fail", "cancel"]))
    def lose(self, which: int, how: str) -> None:
        if not self.requests:
            return
        request = self.requests.pop(which % len(self.requests))

        async def end() -> None:
            if how == "fail":
                request.call.answer.set_exception(EngineFailedError("gone"))
            else:
                request.task.cancel()
            await asyncio.wait([request.task])
            assert request.task.cancelled() or request.task.exception() is not None

        self.runner.run(end())

    @invariant()
    def every_sampled_token_is_trained_exactly_once(self) -> None:
        samples = self.session.samples()
        for version, (prompt, ids) in self.written.items():
            (home,) = [(s, p) for s in samples for p in s.spans if p.weight_version == version]
            sample, span = home
            assert sample.ids[: span.stop] == (*prompt, *ids)
            assert span.start == len(prompt)
            assert all(sample.loss_mask[span.start : span.stop])
        total = sum(len(ids) for _, ids in self.written.values())
        assert sum(sample.num_sampled_tokens for sample in samples) == total

    @invariant()
    def samples_tile_and_are_what_was_sent_and_sampled(self) -> None:
        sent = {(*prompt, *ids) for prompt, ids in self.written.values()}
        for sample in self.session.samples():
            assert sample.ids in sent
            ends = [span.stop for span in sample.spans]
            assert [span.start for span in sample.spans] == [0, *ends[:-1]]
            assert ends[-1] == len(sample.ids) == len(sample.logprobs) == len(sample.loss_mask)
            assert sample.spans[0].origin is Origin.PROMPT
            for span in sample.spans:
                sampled = span.origin is Origin.SAMPLED
                assert set(sample.loss_mask[span.start : span.stop]) == {sampled}
                assert set(sample.logprobs[span.start : span.stop]) == {-0.5 if sampled else 0.0}

    def teardown(self) -> None:
        async def end() -> None:
            for request in self.requests:
                request.task.cancel()
                await asyncio.wait([request.task])

        self.runner.run(end())
        assert self.session.num_under_way == 0
        if self.written:
            trajectory = self.session.finish()
            assert trajectory.num_sampled_tokens == sum(
                len(ids) for _, ids in self.written.values()
            )
            assert trajectory.assistant_turns == len(self.written)
        self.runner.close()


def _answer(call: ToolCall) -> Message:
    return Message(role="tool", content="r", tool_call_id=call.id)


AnyAgent.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyAgent = AnyAgent.TestCase
