"""The trajectory: the result of one attempt of one task.

Invariant: there is exactly one per task. `error` is set if and only if `stop` is ERROR; then there
is no sample and nothing to train on. Every sampled token is in exactly one sample, under its loss
mask. `messages` and `tokens` agree: an answer that did not fit into the budget is in neither.

Most attempts are one conversation and have one sample. An attempt with several conversations
(sub-agents, a compacted history, an agent that edits its history) has one sample per conversation.
The samples share the reward and are one member of their group. Where several players of one model
act, as in self-play, each has samples with a reward (`SampleReward`), compared with the same
player's in the group's other trajectories.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Self, cast

from treadle.agent_loop.errors import RolloutError
from treadle.agent_loop.tokens.late_field import FieldSource, LateField
from treadle.agent_loop.tokens.transcript import Tokens
from treadle.agent_loop.types import AgentTask, Image, Message, StopReason
from treadle.tracing import Metric
from treadle.tracing.inert import inert

# The variance of a group needs the square, which must be a float too.
_MAX_REWARD = 1e100


def check_reward(reward: float) -> None:
    """Raises unless a reward is a finite number of usual size.

    Raises:
        ValueError: It is not; the message has the value and the bounds.
    """
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}; it must be a finite number")
    if abs(reward) > _MAX_REWARD:
        raise ValueError(
            f"the reward is {reward}; it must be between {-_MAX_REWARD:g} and {_MAX_REWARD:g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward with metrics.

    Attributes:
        value: The reward; a number of at most 1e100 in magnitude.
        answer: The trajectory's answer as the reward read it; validation counts equal texts as
            votes. None if it gave none, or the reward reads none.

    Raises:
        ValueError: The value is no such number.
    """

    value: float
    metrics: tuple[Metric, ...] = ()
    answer: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.value, Real):
            raise ValueError(f"the reward is {self.value!r}; it must be a finite number")
        check_reward(float(self.value))

    @classmethod
    def of(cls, result: object) -> "Score":
        """Converts what a reward function returned to a score.

        Args:
            result: A score, a number, or as in verl a mapping with "score": its other numbers
                become metrics `reward/<key>`, and the text under "pred" is the answer.

        Raises:
            ValueError: It is none of these, or its number is not finite.
        """
        if not isinstance(result, Mapping):
            return result if isinstance(result, Score) else cls(value=cast(float, result))
        if "score" not in result:
            has = ", ".join(map(str, result)) or "nothing"
            raise ValueError(f'the mapping has no "score"; it has: {has}')
        score, pred = cls.of(result["score"]), result.get("pred")
        metrics = tuple(
            Metric(f"reward/{key}", float(value))
            for key, value in result.items()
            if key != "score" and isinstance(value, Real) and math.isfinite(value)
        )
        answer = pred if isinstance(pred, str) else score.answer
        return replace(score, metrics=(*score.metrics, *metrics), answer=answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An observation about a trajectory that deserves attention and is not an error.

    Attributes:
        kind: Findings of one kind are counted together (`drift`, `malformed_call`,
            `unknown_tool`, `stalled`).
        text: A description for people; what a model or a tool wrote in it is inert (`inert`).
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", inert(self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReward:
    """The reward of one sample, where those of a trajectory differ.

    Attributes:
        player: Whose sample it is; compared within the group with samples of the same player.
        value: A number of at most 1e100 in magnitude.

    Raises:
        ValueError: The value is no such number.
    """

    player: str
    value: float

    def __post_init__(self) -> None:
        check_reward(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The participants of a conversation, after the messages that its task began with.

    Attributes:
        tools_called: Names in the calls of the model, each once, in the order of the calls.
        tools_answered: Names in tool results, each once; None is a result without a name.
        user_answered: Whether there is a user message.
    """

    tools_called: tuple[str, ...]
    tools_answered: tuple[str | None, ...]
    user_answered: bool

    @classmethod
    def of(cls, messages: Sequence[Message]) -> "Exchange":
        """Returns it of the messages after the task's."""
        called = (call.name for message in messages for call in message.tool_calls)
        answered = (message.name for message in messages if message.role == "tool")
        return cls(
            tools_called=tuple(dict.fromkeys(called)),
            tools_answered=tuple(dict.fromkeys(answered)),
            user_answered=any(message.role == "user" for message in messages),
        )


class MessageSource(FieldSource[tuple[Message, ...]]):
    """Makes the messages of a trajectory that came from another process.

    Args:
        images: The images of the messages, each once.
    """

    __slots__ = ("exchange", "images")

    def __init__(self, exchange: Exchange, images: tuple[Image, ...]) -> None:
        super().__init__()
        self.exchange = exchange
        self.images = images


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(LateField[MessageSource]):
    """One attempt that has ended.

    Attributes:
        task: The task that was attempted.
        samples: Ids, mask, log-probabilities and versions of each conversation, [L] each; the
            last one belongs to `messages`.
        messages: The whole conversation, beginning with the task's messages.
        user_turns: Number of answers to the model: rounds of tool results, or user messages.
        reward: None if nothing scored it, which differs from a reward of 0.
        sample_rewards: One per sample where players have their own rewards, else empty.
            `reward` is then what is reported, and these are learned from. Samples of one player
            are adjacent and have one value.
        answer: The answer as its reward read it (`Score.answer`).
        tool_rewards: One per tool call, in the order of the calls.
        turn_scores: Scores that an interaction gave to turns, in their order.
        metrics: Counts and times, named like `tool/calls`, `agent_loop/generate_s`.
        findings: In the order in which they occurred.

    Raises:
        ValueError: `stop` and `error` contradict, the reward is refused by `check_reward`, or the
            sample rewards do not fit the samples.
    """

    _LATE: ClassVar[str] = "messages"

    task: AgentTask
    samples: tuple[Tokens, ...]
    messages: tuple[Message, ...]
    stop: StopReason
    assistant_turns: int = 0
    user_turns: int = 0
    reward: float | None = None
    sample_rewards: tuple[SampleReward, ...] = ()
    answer: str | None = None
    tool_rewards: tuple[float, ...] = ()
    turn_scores: tuple[float, ...] = ()
    metrics: tuple[Metric, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: RolloutError | None = None

    def __post_init__(self) -> None:
        if (self.error is not None) is not (self.stop is StopReason.ERROR):
            raise ValueError(f"stop is {self.stop} and error is {self.error!r}; they contradict")
        if self.reward is not None:
            check_reward(self.reward)
        if self.sample_rewards:
            self._check_sample_rewards()

    def _check_sample_rewards(self) -> None:
        given = self.sample_rewards
        if len(given) != len(self.samples):
            raise ValueError(
                f"there are {len(given)} sample_rewards for {len(self.samples)} samples"
            )
        if self.reward is None:
            raise ValueError("sample_rewards need a reward of the trajectory, which is reported")
        players = [player for player, _ in itertools.groupby(given, key=lambda each: each.player)]
        if len(set(players)) < len(players) or len({*given}) > len(players):
            raise ValueError(
                "the samples of a player must be adjacent and have one reward, got "
                + ", ".join(f"{each.player!r}: {each.value:g}" for each in given)
            )

    @classmethod
    def failed(cls, task: AgentTask, error: RolloutError) -> "Trajectory":
        """Returns the trajectory of an attempt that failed."""
        return cls(
            task=task,
            samples=(),
            messages=task.messages,
            stop=StopReason.ERROR,
            error=error,
        )

    def replaced(self, **changes: Any) -> Self:
        """Returns it with other values, as `dataclasses.replace`, and makes no messages for that.

        Raises:
            TypeError: There is no such field.
            ValueError: As the class.
        """
        source = self.source
        if source is None or self._LATE in changes:
            return replace(self, **changes)
        values = self.values_but_late()
        if unknown := changes.keys() - values.keys():
            raise TypeError(f"a trajectory has no field {', '.join(sorted(unknown))}")
        made = self.of_source(source, **values | changes)
        made.__post_init__()
        return made

    @property
    def exchange(self) -> Exchange:
        """The participants after the task's messages; known without making `messages`."""
        if self.source is not None:
            return self.source.exchange
        return Exchange.of(self.messages[len(self.task.messages) :])

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of the messages, each object once; known without making `messages`."""
        if self.source is not None:
            return self.source.images
        shown = (image for message in self.messages for image in message.images)
        return tuple({id(image): image for image in shown}.values())

    @property
    def tokens(self) -> Tokens:
        """The last sample; one without tokens if there is none."""
        return self.samples[-1] if self.samples else Tokens.empty()

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens under the loss mask, over all samples."""
        return sum(sample.num_sampled_tokens for sample in self.samples)

    @property
    def num_turns(self) -> int:
        """Number of turns as verl counts: the prompt, every completion and every answer."""
        return 1 + self.assistant_turns + self.user_turns

    @property
    def final_text(self) -> str:
        """Text of the last assistant message; "" if there is none."""
        for message in reversed(self.messages):
            if message.role == "assistant":
                return message.content
        return ""
