"""The captured session: records the completions of an agent that it does not control.

Such an agent sends its whole conversation with every request, and may change it at will. The
session keeps branches, each with its own ledger, and finds for each request the branch whose
messages it continues:

    recorded  [user, A1, tool, A2]
    request   [user, A1, tool, A2, user]   extends the branch: EXACT, or REALIGNED
    request   [user, A1, tool']            FORK after A1
    request   [user, A1, tool]             FORK before A2: the request was repeated
    request   [system', user]              ROOT

Invariants:

1. Each sampled token is under the loss mask of exactly one sample; the shared part of a fork is
   observed.
2. The ids of a sample are the ids sent to the generator, followed by the sampled ones. The text of
   a shared turn is never retokenised.
3. Requests may run concurrently. One that fails or is cancelled leaves no trace.
4. Ids of tool calls are unique in the session.
5. A long request is rendered beside the event loop, and one that cannot fit `max_context_tokens`
   is refused before all of it is tokenized, if the renderer can (`BoundedRenderer`).

Limits hold per sample (`max_response_tokens` after its own prompt, `max_context_tokens`) and per
session (`max_assistant_turns` completions, `max_user_turns` requests that answer a completion).
They are checked before sampling: a request that a limit forbids raises `LimitReachedError`. An
agent may recover from a limit on lengths, for example by compacting its history.

    with CapturedSession(task, services) as session:
        turn = await session.complete(messages, tools=specs)
        return session.finish()

Tasks that use a session share one event loop. They wait in `complete`: for the requests before
them to be rendered, one at a time, and for the generator.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.capture.branch import (
    BranchPlan,
    Draft,
    make_draft,
    plan_ids,
)
from treadle.agent_loop.capture.call_ids import CallIds
from treadle.agent_loop.capture.session_record import CapturedTurn, SessionRecord
from treadle.agent_loop.capture.stop_strings import cut_at_stop
from treadle.agent_loop.capture.streamed_text import StreamedText, TurnDelta
from treadle.agent_loop.capture.template_fit import TemplateFit
from treadle.agent_loop.errors import LoopError, PromptTooLongError, RolloutError
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.loops.sampler import TurnSampler
from treadle.agent_loop.runner.seeds import derive_seed
from treadle.agent_loop.span_content import message_content
from treadle.agent_loop.tokens.renderer import BoundedRenderer, ParsedCompletion
from treadle.agent_loop.tokens.transcript import Tokens
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.types import (
    AgentTask,
    Message,
    SamplingParams,
    StopReason,
    TokenChunk,
    ToolSpec,
)
from treadle.tracing import Metric, span

_LONG = 1 << 16
"""Number of characters from which on a request is rendered beside the event loop."""


class LimitReachedError(RolloutError):
    """A limit forbids this completion; nothing was sampled."""

    def __init__(self, message: str, *, stop: StopReason) -> None:
        super().__init__(message)
        self.stop = stop


class SessionEndedError(LoopError):
    """A completion was requested after `finish`, or ended after it."""


class CapturedSession:
    """Answers an agent's requests and records them.

    Args:
        task: The task to attempt. The agent decides how it uses the task's messages.
    """

    def __init__(self, task: AgentTask, services: Services) -> None:
        self._task = task
        self._services = services
        self._sampler = TurnSampler(task, services)
        self._renderer = services.renderer
        bound = services.limits.max_context_tokens
        if bound is not None and isinstance(self._renderer, BoundedRenderer):
            self._renderer = self._renderer.bounded(bound)
        self._fit = TemplateFit(services.renderer)
        self._planning = asyncio.Lock()
        self._call_ids = CallIds()
        self._record = SessionRecord(task, services, self._fit, self._sampler)
        self._under_way = 0
        self._answers_under_way = 0
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        if error is not None:
            error.add_note(
                f"session {self.session_id} had {self._record.assistant_turns} completions in "
                f"{len(self._record.branches)} branches, and {self._under_way} in flight"
            )

    @property
    def session_id(self) -> str:
        """Identifies the session in logs, in traces and at the servers."""
        return self._sampler.session_id

    @property
    def assistant_turns(self) -> int:
        """Number of completions so far."""
        return self._record.assistant_turns

    @property
    def num_under_way(self) -> int:
        """Number of requests that wait for their completion."""
        return self._under_way

    @property
    def exhausted(self) -> StopReason | None:
        """The limit that forbids any answer to the latest completion; None if there is room.

        Runs checks 2, 3, 5 and 6 of `limits`, so that an agent need not run tools in vain.
        """
        if not self._record.branches:
            return None
        limits, last = self._services.limits, self._record.by_age()[-1].transcript
        return limits.length_stop(
            prompt=last.num_prompt_tokens, response=last.num_response_tokens
        ) or limits.turn_stop(
            assistant_turns=self._record.assistant_turns, user_turns=self._record.user_turns
        )

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> CapturedTurn:
        """Samples the assistant's next turn of a conversation; see `choices`."""
        (turn,) = await self.choices(
            messages,
            tools=tools,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed,
            stop=stop,
        )
        return turn

    async def choices(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[ToolSpec] = (),
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        on_delta: Callable[[int, TurnDelta], None] | None = None,
    ) -> tuple[CapturedTurn, ...]:
        """Samples several answers to one conversation, each its assistant's next turn.

        All are recorded, or none: the first one as `complete` records it, the others as samples
        that begin with its prompt.

        Args:
            messages: The whole conversation, as the agent has it; ends with a message that the
                model can answer.
            n: Number of answers; at least 1.
            tools: Shown to the model. Without tools, the text is not searched for calls.
            max_tokens: Additional bound on this completion, besides the limits.
            sampling: Replaces the run's sampling parameters. For evaluation only, because the
                trainer assumes the run's.
            seed: Seed of the first completion; those of the others are derived from it. None means
                derived from the task's.
            stop: Strings that end the turn; see `stop_strings`.
            on_delta: Called with the index of an answer and what has been added to it, while it is
                sampled; before this returns, with everything. See `streamed_text`.

        Raises:
            ValueError: There are no messages, or the last one is the assistant's; or `max_tokens`
                is below 1, or a stop string is empty.
            LimitReachedError: A limit forbids the completion.
            RenderError: The template refuses these messages.
            GenerationError: The completion could not be made.
            SessionEndedError: The session is over.
        """
        self._check_open()
        _check_request(messages, max_tokens, stop)
        async with self._planning:
            plan = await self._plan(
                make_draft(self._record.branches, tuple(messages), tuple(tools))
            )
        return await self._answer(
            plan,
            n=n,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed,
            stop=stop,
            on_delta=on_delta,
        )

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> int:
        """Returns the number of tokens of a conversation as it would begin; records nothing.

        Raises:
            PromptTooLongError: It cannot fit `max_context_tokens`.
            RenderError: The template refuses these messages.
        """
        async with self._planning:
            plan = await self._rendered(make_draft((), tuple(messages), tuple(tools)))
        return len(plan.prompt)

    async def continue_ids(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> tuple[CapturedTurn, ...]:
        """Samples several answers to a prompt of ids, for agents that render chats themselves.

        A prompt that begins with all ids of a sample extends it; its other ids are observed. Any
        other prompt begins a new sample. Such a trajectory's messages are the text of its ids, and
        no drift is measured.

        Args:
            prompt: [P] ids, at least one.
            n: Number of samples; the other arguments are those of `choices`.
            max_tokens: Additional bound on each answer, besides the limits.
            sampling: Replaces the run's sampling parameters.
            seed: Seed of the first completion.
            stop: Strings that end the turn.

        Raises:
            ValueError: There are no ids.
            RenderError: An id is unknown.
            LimitReachedError: A limit forbids the completion.
            GenerationError: The completion could not be made.
            SessionEndedError: The session is over.
        """
        self._check_open()
        if not prompt:
            raise ValueError("the prompt has no ids")
        # Before the ids are decoded, which holds the event loop.
        if (limit := self._services.limits.length_stop(prompt=len(prompt), response=0)) is not None:
            raise self._refusal(limit, f"the prompt of this one has {len(prompt)} tokens")
        async with self._planning:
            plan = plan_ids(self._record.branches, tuple(prompt), self._services.renderer)
        return await self._answer(
            plan, n=n, max_tokens=max_tokens, sampling=sampling, seed=seed, stop=stop
        )

    async def _answer(
        self,
        plan: BranchPlan,
        *,
        n: int,
        max_tokens: int | None,
        sampling: SamplingParams | None,
        seed: int | None,
        stop: Sequence[str],
        on_delta: Callable[[int, TurnDelta], None] | None = None,
    ) -> tuple[CapturedTurn, ...]:
        """Samples and records the answers of a plan, which was made just now."""
        # From here to `_extending` nothing waits, so that no other request plans with this branch.
        self._check_open()
        left = self._tokens_left(plan, n)
        if max_tokens is not None:
            left = min(left, max_tokens)
        plans = [plan, *(plan.sibling() for _ in range(n - 1))]
        with self._extending(plan, n):
            samplings = [
                self._sample(
                    each,
                    left=left,
                    sampling=sampling,
                    seed=seed if seed is None or not index else derive_seed(seed, index),
                    stop=stop,
                    on_delta=None if on_delta is None else partial(on_delta, index),
                )
                for index, each in enumerate(plans)
            ]
            sampled = await concurrently(samplings)
        self._check_open()
        for each, (turn, uncut, past) in zip(plans, sampled, strict=True):
            self._record.write(each, turn, uncut=uncut, num_past_stop=past)
        return tuple(turn for turn, _, _ in sampled)

    async def _sample(
        self,
        plan: BranchPlan,
        *,
        left: int,
        sampling: SamplingParams | None,
        seed: int | None,
        stop: Sequence[str],
        on_delta: Callable[[TurnDelta], None] | None,
    ) -> tuple[CapturedTurn, str | None, int]:
        """Samples a turn and writes nothing.

        Returns:
            The turn, its text with the stop string if it was cut there, and the number of tokens
            that were sampled after it.
        """
        renderer, tools, prompt = self._services.renderer, plan.branch.tools, plan.prompt
        number = self._sampler.num_requests
        streamed = StreamedText(renderer, prompt=prompt, stop=stop)

        def show(chunk: TokenChunk) -> None:
            if on_delta is not None and (delta := streamed.add(chunk)):
                on_delta(delta)

        with span("turn", index=number, how=plan.how.value) as trace:
            completion = await self._sampler.sample(
                prompt,
                left=left,
                images=plan.images,
                num_routed_rows=plan.branch.transcript.num_routed_rows,
                sampling=sampling,
                seed=seed,
                on_tokens=None if on_delta is None else show,
            )
            self._check_open()
            cut = cut_at_stop(completion, stop, renderer, tools=tools, prompt=prompt)
            parsed = self._numbered(cut.parsed)
            if trace.recording:
                trace.set(output=message_content(parsed.message))
        if on_delta is not None:
            on_delta(streamed.end(cut.completion, parsed.message))
        turn = CapturedTurn(
            parsed=parsed,
            finish=cut.completion.finish,
            completion=cut.completion,
            num_prompt_tokens=len(prompt),
            how=plan.how,
            number=number,
            constrained=sampling is not None and sampling.constraint is not None,
            call_ids=tuple(call.id for call in cut.parsed.message.tool_calls),
            stop_string=None if cut.uncut is None else cut.uncut[len(parsed.message.content) :],
        )
        return turn, cut.uncut, completion.num_tokens - cut.completion.num_tokens

    async def _plan(self, draft: Draft) -> BranchPlan:
        try:
            return await self._rendered(draft)
        except PromptTooLongError as error:
            raise self._refusal(StopReason.CONTEXT_LENGTH, str(error)) from error

    async def _rendered(self, draft: Draft) -> BranchPlan:
        """Renders a draft, beside the event loop if it is long."""
        if draft.num_characters < _LONG:
            return draft.render(self._renderer, self._fit)
        return await asyncio.to_thread(draft.render, self._renderer, self._fit)

    @contextmanager
    def _extending(self, plan: BranchPlan, n: int) -> Iterator[None]:
        """Reserves the branch for this request, and counts its answers against the limits."""
        plan.branch.busy = True
        self._under_way += n
        self._answers_under_way += plan.is_answer
        try:
            yield
        finally:
            plan.branch.busy = False
            self._under_way -= n
            self._answers_under_way -= plan.is_answer

    def close(self) -> None:
        """Refuses further completions and ends the session at the servers; `with` calls it."""
        self._ended = True
        self._sampler.close()

    def samples(self) -> tuple[Tokens, ...]:
        """Returns each branch's tokens; the branch with the latest request comes last."""
        return self._record.samples()

    def finish(
        self,
        stop: StopReason | None = None,
        *,
        reward: float | None = None,
        metrics: Sequence[Metric] = (),
    ) -> Trajectory:
        """Freezes the trajectory; later completions are refused.

        Args:
            stop: None means FINISHED, or the limit that cut or refused the last request.
            metrics: Added to the session's metrics.

        Raises:
            LoopError: The agent never got a completion.
        """
        self._ended = True
        if not self._record.branches:
            refused = self._record.refused
            why = f"; a limit refused it: {refused}" if refused else ""
            raise LoopError(f"the agent of task {self._task.task_id!r} got no completion{why}")
        return self._record.trajectory(stop, reward=reward, metrics=metrics)

    def _tokens_left(self, plan: BranchPlan, n: int) -> int:
        """Returns the maximum number of tokens of each of n completions; at least 1."""
        limits, transcript = self._services.limits, plan.branch.transcript
        prompt = transcript.num_prompt_tokens
        response = transcript.num_response_tokens + len(plan.observed.ids)
        stop = limits.turn_stop(
            assistant_turns=self._record.assistant_turns + self._under_way + n - 1,
            # As in `limits`, an answer counts when it is given: the model may reply to the last.
            user_turns=self._record.user_turns + self._answers_under_way if plan.is_answer else 0,
        ) or limits.length_stop(prompt=prompt, response=response)
        if stop is None:
            return limits.tokens_left(prompt=prompt, response=response)
        raise self._refusal(
            stop, f"this one would be asked after {prompt} prompt and {response} response tokens"
        )

    def _refusal(self, stop: StopReason, why: str) -> LimitReachedError:
        """Returns the error of a request that a limit forbids, and counts it."""
        limits = self._services.limits
        self._record.refuse(stop)
        names = (
            "max_response_tokens",
            "max_context_tokens",
            "max_assistant_turns",
            "max_user_turns",
        )
        bounds = ", ".join(f"{n} {v}" for n in names if (v := getattr(limits, n)) is not None)
        return LimitReachedError(
            f"session {self.session_id} has reached its limit {stop.value}: it had "
            f"{self._record.assistant_turns} completions, and {why} ({bounds})",
            stop=stop,
        )

    def _numbered(self, parsed: ParsedCompletion) -> ParsedCompletion:
        """Returns the turn with call ids that are unique in the session."""
        message = parsed.message
        calls = tuple(replace(call, id=self._call_ids.take(call.id)) for call in message.tool_calls)
        malformed = tuple(replace(bad, id=self._call_ids.take(bad.id)) for bad in parsed.malformed)
        return replace(parsed, message=replace(message, tool_calls=calls), malformed=malformed)

    def _check_open(self) -> None:
        if self._ended:
            raise SessionEndedError(f"session {self.session_id} is over: its trajectory is frozen")


def _check_request(
    messages: Sequence[Message], max_tokens: int | None, stop: Sequence[str]
) -> None:
    if not messages or messages[-1].role == "assistant":
        raise ValueError(
            "the messages must end with one that the model can answer; "
            + ("the last one is the assistant's" if messages else "there are none")
        )
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    if not all(stop):
        raise ValueError("a stop string is empty")
