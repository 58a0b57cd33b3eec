"""The conversation: one trajectory under way, as an agent loop drives it.

Invariant: ledger and messages grow together; every completion that comes back is checked, written
and parsed before anyone sees it, and nothing is written that would leave no room for the model
to speak last. Used as a context manager so that the generator learns when the session is over.

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        with Conversation(task, services) as chat:
            await chat.generate()
            if chat.answer([Message(role="user", content="Are you sure?")]) is None:
                await chat.generate()
            return chat.finish(StopReason.FINISHED)

One task owns a conversation. It waits in `generate` only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from treadle.agent_loop.drift import Recorded, measure_drift
from treadle.agent_loop.errors import PromptTooLongError
from treadle.agent_loop.loop import Services
from treadle.agent_loop.renderer import MalformedCall, ParsedCompletion
from treadle.agent_loop.sampler import TurnSampler
from treadle.agent_loop.trajectory import Finding, Trajectory
from treadle.agent_loop.transcript import Transcript
from treadle.agent_loop.types import (
    AgentTask,
    FinishReason,
    Message,
    StopReason,
    ToolCall,
    ToolSpec,
)
from treadle.tracing import Metric, Reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion, written and read.

    Attributes:
        parsed: The completion as a message and the calls in it.
        finish: Why the completion ended.
    """

    parsed: ParsedCompletion
    finish: FinishReason

    @property
    def requests(self) -> tuple[ToolCall | MalformedCall, ...]:
        """What the model asks for, in its order."""
        return self.parsed.requests

    @property
    def closed(self) -> bool:
        """Whether the model ended the turn itself."""
        return self.finish is FinishReason.STOP


class Conversation:
    """One trajectory under way.

    Args:
        task: What is attempted.
        services: What it is attempted with.
        tools: Shown to the model.

    Raises:
        RenderError: The template refuses the task's messages.
        PromptTooLongError: The prompt leaves no room for a single token.
    """

    def __init__(
        self, task: AgentTask, services: Services, *, tools: Sequence[ToolSpec] = ()
    ) -> None:
        self._task = task
        self._services = services
        self._tools = tuple(tools)
        self._messages = list(task.messages)
        rendered = services.renderer.render(task.messages, tools=self._tools)
        self._transcript = Transcript(rendered.ids, images=rendered.images)
        self._assistant_turns = 0
        self._user_turns = 0
        self._findings: list[Finding] = []
        self._activity = "about to begin"
        self._sampler = TurnSampler(task, services)
        prompt = self._transcript.num_prompt_tokens
        if services.limits.tokens_left(prompt=prompt, response=0) < 1:
            raise PromptTooLongError(
                f"the prompt of task {task.task_id!r} has {prompt} tokens; the context holds "
                f"{services.limits.max_context_tokens} with the response: filter or cut the row"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sampler.close()
        if error is not None:
            error.add_note(
                f"session {self.session_id} was {self._activity}, after "
                f"{self._assistant_turns} completions and {len(self._transcript)} tokens"
            )

    @property
    def session_id(self) -> str:
        """Names the trajectory in logs, traces and at the servers."""
        return self._sampler.session_id

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        return tuple(self._messages)

    @property
    def assistant_turns(self) -> int:
        """Completions so far."""
        return self._assistant_turns

    @property
    def user_turns(self) -> int:
        """Answers so far."""
        return self._user_turns

    async def generate(self) -> Turn:
        """Samples the assistant's next turn, writes it and reads it.

        Raises:
            GenerationError: The completion could not be made.
        """
        transcript, services = self._transcript, self._services
        left = services.limits.tokens_left(
            prompt=transcript.num_prompt_tokens, response=transcript.num_response_tokens
        )
        if left < 1:
            raise ValueError("generate() was called after the budget was used up; check answer()")
        self._activity = f"generating as {self._sampler.next_request_id}"
        prompt = transcript.ids
        completion = await self._sampler.sample(prompt, left=left, images=transcript.images)
        transcript.sample(completion)
        parsed = services.renderer.parse(completion.token_ids, tools=self._tools, prompt=prompt)
        self._messages.append(parsed.message)
        self._assistant_turns += 1
        self._findings.extend(
            Finding(kind="malformed_call", text=f"{bad.reason}: {bad.text:.200}")
            for bad in parsed.malformed
        )
        self._activity = "between turns"
        return Turn(parsed=parsed, finish=completion.finish)

    def length_stop(self) -> StopReason | None:
        """Checks 2 and 3 of `limits`."""
        transcript = self._transcript
        return self._services.limits.length_stop(
            prompt=transcript.num_prompt_tokens, response=transcript.num_response_tokens
        )

    def answer(self, messages: Sequence[Message]) -> StopReason | None:
        """Gives the model tool results or a user's message, unless no room would be left.

        Returns:
            None when the messages were appended; else the limit (checks 8 and 9) that keeps
            them out, and the trajectory has to end as it is.

        Raises:
            RenderError: The template refuses these messages.
        """
        transcript = self._transcript
        answer = self._services.renderer.extend(
            transcript.ids, messages, tools=self._tools, history=self._messages
        )
        stop = self._services.limits.length_stop(
            prompt=transcript.num_prompt_tokens,
            response=transcript.num_response_tokens + len(answer.ids),
        )
        if stop is None:
            transcript.observe(answer.ids, images=answer.images)
            self._messages.extend(messages)
            self._user_turns += 1
        return stop

    def doing(self, activity: str) -> None:
        """Notes what the loop does now, for the text of an error or a timeout."""
        self._activity = activity
        self._services.pulse.beat(f"{activity} in session {self.session_id}")

    def finish(
        self,
        stop: StopReason,
        *,
        reward: float | None = None,
        tool_rewards: Sequence[float] = (),
        turn_scores: Sequence[float] = (),
        metrics: Sequence[Metric] = (),
    ) -> Trajectory:
        """Freezes the trajectory."""
        own = (
            Metric("agent_loop/generate_s", self._sampler.generate_s, Reduce.MEAN),
            Metric("agent_loop/assistant_turns", self._assistant_turns, Reduce.MEAN),
            Metric("agent_loop/user_turns", self._user_turns, Reduce.MEAN),
            Metric("tool/parse_errors", len(self._findings), Reduce.SUM),
        )
        tokens = self._transcript.freeze()
        recorded = Recorded(tokens=tokens, messages=self.messages, tools=self._tools)
        drift = measure_drift([recorded], self._services.renderer)
        return Trajectory(
            task=self._task,
            samples=(tokens,),
            messages=self.messages,
            stop=stop,
            assistant_turns=self._assistant_turns,
            user_turns=self._user_turns,
            reward=reward,
            tool_rewards=tuple(tool_rewards),
            turn_scores=tuple(turn_scores),
            metrics=(*own, *drift.metrics, *metrics),
            findings=(*self._findings, *drift.findings),
        )
