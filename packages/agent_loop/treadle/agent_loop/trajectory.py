"""The trajectory: what one attempt of one task yields.

Invariant: exactly one per task. `error` is set if and only if `stop` is ERROR; then there is no
sample and nothing to train on. Every token that was sampled is in exactly one sample, under its
loss mask. `messages` says what `tokens` say: an answer that did not fit into the budget is in
neither.

Most attempts are one conversation and have one sample. One that makes several (sub-agents, a
history that was compacted, an agent that edits what it said before) has a sample for each; they
share the reward, and are one member of their group.
"""

import math
from dataclasses import dataclass

from treadle.agent_loop.errors import RolloutError
from treadle.agent_loop.tokens.transcript import Tokens
from treadle.agent_loop.types import AgentTask, Message, StopReason
from treadle.tracing import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about a trajectory that is worth a look, and is no error.

    Attributes:
        kind: What it is; findings of one kind are counted together (`drift`, `malformed_call`,
            `stalled`).
        text: This one, for people.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt, ended.

    Attributes:
        task: The task that was attempted.
        samples: Ids, mask, log-probabilities and versions of each conversation, [L] each; the
            last one is the conversation that `messages` are of.
        messages: The whole conversation, the task's messages first.
        stop: Why it ended.
        assistant_turns: Completions.
        user_turns: Answers given to the model: rounds of tool results, or user messages.
        reward: None when nothing scored it, which is not a reward of 0.
        tool_rewards: Of the tool calls, in the order of the calls.
        turn_scores: That an interaction gave to the turns, in their order.
        metrics: Counts and times, named as `tool/calls`, `agent_loop/generate_s`.
        findings: What is worth a look, in the order in which it happened.
        error: Why the attempt failed.

    Raises:
        ValueError: Stop and error contradict, or the reward is not finite.
    """

    task: AgentTask
    samples: tuple[Tokens, ...]
    messages: tuple[Message, ...]
    stop: StopReason
    assistant_turns: int = 0
    user_turns: int = 0
    reward: float | None = None
    tool_rewards: tuple[float, ...] = ()
    turn_scores: tuple[float, ...] = ()
    metrics: tuple[Metric, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: RolloutError | None = None

    def __post_init__(self) -> None:
        if (self.error is not None) is not (self.stop is StopReason.ERROR):
            raise ValueError(f"stop is {self.stop} and error is {self.error!r}; they contradict")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}; it must be a finite number")

    @classmethod
    def failed(cls, task: AgentTask, error: RolloutError) -> "Trajectory":
        """The trajectory of an attempt that failed."""
        return cls(
            task=task,
            samples=(),
            messages=task.messages,
            stop=StopReason.ERROR,
            error=error,
        )

    @property
    def tokens(self) -> Tokens:
        """The last sample; without any token when there is none."""
        return self.samples[-1] if self.samples else Tokens.empty()

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the loss is taken over, of all samples."""
        return sum(sample.num_sampled_tokens for sample in self.samples)

    @property
    def num_turns(self) -> int:
        """As verl counts: the prompt, every completion and every answer. One completion is 2."""
        return 1 + self.assistant_turns + self.user_turns

    @property
    def final_text(self) -> str:
        """Text of the last assistant message; "" when there is none."""
        for message in reversed(self.messages):
            if message.role == "assistant":
                return message.content
        return ""
