"""The conversation: a trajectory in progress, as an agent loop drives it.

Invariant: ledger and messages grow together. Every completion is checked, written and parsed
before the loop sees it. Nothing is written that would leave no room for the model to have the last
word. Use it as a context manager, so that the generator learns when the session is over.

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        with Conversation(task, services) as chat:
            await chat.generate()
            if chat.answer([Message(role="user", content="Are you sure?")]) is None:
                await chat.generate()
            return chat.finish(StopReason.FINISHED)

A trajectory may have several conversations: `another` begins one more, for a sub-agent or with a
compacted history. Each becomes a sample with its own prompt and limits; together they are one
trajectory with one reward. Their session ids differ.

One task owns a conversation. It waits in `generate` only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from treadle.agent_loop.errors import PromptTooLongError
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.loops.sampler import TurnSampler
from treadle.agent_loop.runner.seeds import derive_seed
from treadle.agent_loop.tokens.renderer import MalformedCall, ParsedCompletion
from treadle.agent_loop.tokens.retokenization_drift import RecordedSample, measure_drift
from treadle.agent_loop.tokens.transcript import Transcript
from treadle.agent_loop.trajectory import Finding, SampleReward, Trajectory
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
    """One completion, written to the ledger and parsed.

    Attributes:
        parsed: The completion as a message and its calls.
    """

    parsed: ParsedCompletion
    finish: FinishReason

    @property
    def requests(self) -> tuple[ToolCall | MalformedCall, ...]:
        """The model's calls, in its order, including malformed ones."""
        return self.parsed.requests

    @property
    def closed(self) -> bool:
        """Whether the model ended the turn itself."""
        return self.finish is FinishReason.STOP


class Conversation:
    """One conversation of a trajectory in progress; the constructor makes the first one.

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
        self._shown = sorted(tool.name for tool in self._tools)
        self._messages = list(task.messages)
        rendered = services.renderer.render(task.messages, tools=self._tools)
        self._transcript = Transcript(rendered.ids, images=rendered.images)
        self._written = [(0, len(rendered.ids))]  # by one call of the renderer each
        self._assistant_turns = 0
        self._user_turns = 0
        self._findings: list[Finding] = []
        self._activity = "about to begin"
        self._sampler = TurnSampler(task, services)
        self._all: list[Conversation] = [self]
        prompt = self._transcript.num_prompt_tokens
        if services.limits.tokens_left(prompt=prompt, response=0) < 1:
            raise PromptTooLongError(
                f"the prompt of task {task.task_id!r} has {prompt} tokens; prompt and response "
                f"may have {services.limits.max_context_tokens}: filter or shorten the row"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for conversation in self._all if self is self._all[0] else (self,):
            conversation._sampler.close()
        if error is not None:
            error.add_note(
                f"session {self.session_id} was {self._activity}, after "
                f"{self._assistant_turns} completions and {len(self._transcript)} tokens"
            )

    @property
    def session_id(self) -> str:
        """Identifies the conversation in logs, in traces and at the servers."""
        return self._sampler.session_id

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        return tuple(self._messages)

    @property
    def assistant_turns(self) -> int:
        """Number of completions so far."""
        return self._assistant_turns

    @property
    def user_turns(self) -> int:
        """Number of answers so far."""
        return self._user_turns

    @property
    def all_assistant_turns(self) -> int:
        """Number of completions so far, in all conversations of the trajectory."""
        return sum(conversation._assistant_turns for conversation in self._all)

    @property
    def all_user_turns(self) -> int:
        """Number of answers so far, in all conversations of the trajectory."""
        return sum(conversation._user_turns for conversation in self._all)

    @property
    def tokens_left(self) -> int:
        """Number of tokens that the limits leave for completions and answers; may be negative."""
        transcript = self._transcript
        return self._services.limits.tokens_left(
            prompt=transcript.num_prompt_tokens, response=transcript.num_response_tokens
        )

    def another(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> "Conversation":
        """Begins another conversation of the same trajectory.

        Its completions have their own seeds, derived from its number. Leaving the `with` block of
        the first conversation ends all of them; a `with` block of another one ends only that one.

        Args:
            messages: The first messages; at least one.

        Raises:
            RenderError: The template refuses the messages.
            PromptTooLongError: The messages leave no room for a single token.
        """
        task, seed = self._all[0]._task, self._services.sampling.seed
        number = len(self._all)
        if task.seed is not None:
            seed = derive_seed(task.seed, "conversation", number)
        elif seed is not None:
            seed = derive_seed(seed, task.task_id, task.rollout_index, "conversation", number)
        made = Conversation(
            replace(task, messages=tuple(messages), seed=seed), self._services, tools=tools
        )
        made._all = self._all
        self._all.append(made)
        return made

    async def generate(self, *, max_tokens: int | None = None) -> Turn:
        """Samples the assistant's next turn, writes it to the ledger and parses it.

        Args:
            max_tokens: Additional bound on this turn. None means that only the sampling
                parameters and the limits bound it.

        Raises:
            GenerationError: The completion could not be made.
            ValueError: There is no room for a token.
        """
        transcript, services = self._transcript, self._services
        left = self.tokens_left if max_tokens is None else min(self.tokens_left, max_tokens)
        if left < 1:
            raise ValueError("generate() was called after the budget was used up; check answer()")
        self._activity = f"generating as {self._sampler.next_request_id}"
        prompt = transcript.ids
        completion = await self._sampler.sample(
            prompt,
            left=left,
            images=transcript.images,
            num_routed_rows=transcript.num_routed_rows,
        )
        transcript.sample(completion)
        parsed = services.renderer.parse(completion.token_ids, tools=self._tools, prompt=prompt)
        self._messages.append(parsed.message)
        self._assistant_turns += 1
        self._findings.extend(
            Finding(kind="malformed_call", text=f"{bad.reason}: {bad.text:.200}")
            for bad in parsed.malformed
        )
        self._findings.extend(
            Finding(
                kind="unknown_tool",
                text=f"the model called {call.name!r}; it was shown {self._shown}",
            )
            for call in parsed.message.tool_calls
            if call.name not in self._shown
        )
        self._activity = "between turns"
        return Turn(parsed=parsed, finish=completion.finish)

    def length_stop(self) -> StopReason | None:
        """Runs checks 2 and 3 of `limits`."""
        transcript = self._transcript
        return self._services.limits.length_stop(
            prompt=transcript.num_prompt_tokens, response=transcript.num_response_tokens
        )

    def answer(self, messages: Sequence[Message], *, reserve: int = 0) -> StopReason | None:
        """Appends tool results or a user's message, unless they would leave no room.

        Args:
            messages: All messages that answer the model's last turn.
            reserve: Number of tokens that must be left besides one for the next completion.

        Returns:
            None if the messages were appended; else the limit (checks 8 and 9) that does not
            allow them, and the trajectory must end as it is.

        Raises:
            RenderError: The template refuses these messages.
        """
        transcript = self._transcript
        answer = self._services.renderer.extend(
            transcript.ids, messages, tools=self._tools, history=self._messages
        )
        stop = self._services.limits.length_stop(
            prompt=transcript.num_prompt_tokens,
            response=transcript.num_response_tokens + len(answer.ids) + reserve,
        )
        if stop is None:
            self._written.append((len(transcript), len(transcript) + len(answer.ids)))
            transcript.observe(answer.ids, images=answer.images)
            self._messages.extend(messages)
            self._user_turns += 1
        return stop

    def doing(self, activity: str) -> None:
        """Records what the loop is doing, for the message of an error or a timeout."""
        self._activity = activity
        self._services.pulse.beat(f"{activity} in session {self.session_id}")

    def finish(
        self,
        stop: StopReason,
        *,
        reward: float | None = None,
        sample_rewards: Sequence[SampleReward] = (),
        tool_rewards: Sequence[float] = (),
        turn_scores: Sequence[float] = (),
        metrics: Sequence[Metric] = (),
    ) -> Trajectory:
        """Freezes the trajectory; its messages and its last sample are this conversation's.

        The samples before it are the other conversations with at least one completion, in the
        order in which they began.

        Args:
            reward: Reward of the trajectory; None: it is scored later.
            sample_rewards: Rewards of players, in the order of the samples; empty: they share the
                reward.
            tool_rewards: One per tool call, in the order of the calls.
            turn_scores: Scores of the interaction, in the order of the turns.
        """
        everyone = self._all
        spoken = [c for c in everyone if c is not self and c._assistant_turns]
        recorded = [
            RecordedSample(
                tokens=c._transcript.freeze(),
                messages=c.messages,
                tools=c._tools,
                written=tuple(c._written),
            )
            for c in (*spoken, self)
        ]
        findings = [finding for c in everyone for finding in c._findings]
        malformed = sum(finding.kind == "malformed_call" for finding in findings)
        generate_s = sum(c._sampler.generate_s for c in everyone)
        interruptions = sum(c._sampler.num_interruptions for c in everyone)
        own = (
            Metric("agent_loop/generate_s", generate_s, Reduce.MEAN),
            Metric("agent_loop/interruptions", interruptions, Reduce.SUM),
            Metric("agent_loop/assistant_turns", self.all_assistant_turns, Reduce.MEAN),
            Metric("agent_loop/user_turns", self.all_user_turns, Reduce.MEAN),
            Metric("tool/parse_errors", malformed, Reduce.SUM),
        )
        drift = measure_drift(recorded, self._services.renderer)
        return Trajectory(
            task=everyone[0]._task,
            samples=tuple(sample.tokens for sample in recorded),
            messages=self.messages,
            stop=stop,
            assistant_turns=self.all_assistant_turns,
            user_turns=self.all_user_turns,
            reward=reward,
            sample_rewards=tuple(sample_rewards),
            tool_rewards=tuple(tool_rewards),
            turn_scores=tuple(turn_scores),
            metrics=(*own, *drift.metrics, *metrics),
            findings=(*findings, *drift.findings),
        )
