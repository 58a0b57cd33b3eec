"""Supervised fine-tuning: trains on demonstrations with the policy's train step.

A `Demonstration` is a finished conversation. It becomes the token ledger of a rollout in which the
model said exactly that: an assistant's turn is sampled (loss mask True, including its end-of-turn
token), everything else is prompt or observed (loss mask False). Imitation and reinforcement thus
share one definition of what the model said, and a model warm-started here sees the same tokens in
its first rollout.

All functions are pure except `fine_tune`, which steps the policy; like `PolicyBackend.train_step`
it is collective.

Example:
    >>> sequence = train_sequence(transcribe(renderer, demonstration))  # doctest: +SKIP
    >>> for stats in fine_tune(policy, [[sequence]]):  # doctest: +SKIP
    ...     log(stats.loss)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from treadle.agent_loop import (
    ChatRenderer,
    Completion,
    FinishReason,
    Message,
    TokenChunk,
    Tokens,
    ToolSpec,
    Transcript,
)
from treadle.trainer.algorithms.losses import NegativeLogLikelihood
from treadle.trainer.policy.backend import PolicyBackend
from treadle.trainer.policy.types import StepStats, TrainSequence

__all__ = ["Demonstration", "fine_tune", "train_sequence", "transcribe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation to imitate.

    Attributes:
        messages: Ends with an assistant's turn; every assistant's turn is imitated.
        tools: The tools in the prompt.

    Raises:
        ValueError: The conversation is empty, does not end with an assistant's turn, starts with
            one, or has two in a row.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()

    def __post_init__(self) -> None:
        """Checks the order of the roles."""
        roles = [message.role for message in self.messages]
        if not roles or roles[-1] != "assistant":
            raise ValueError(f"a demonstration ends with an assistant's turn; got roles {roles}")
        previous = "assistant"
        for role in roles:
            if role == previous == "assistant":
                raise ValueError(f"an assistant's turn answers another role's message; got {roles}")
            previous = role


def transcribe(renderer: ChatRenderer, demonstration: Demonstration) -> Tokens:
    """Writes the ledger of a rollout in which the model said what the demonstration says.

    A turn ends with its first stop token, which would have ended the completion.

    Args:
        renderer: Renderer of the model to train.
        demonstration: The conversation.

    Returns:
        The ledger; its log-probabilities are 0.0 and its weight version is 0, as nothing was
        sampled.

    Raises:
        ValueError: The renderer's template does not render each turn as a prefix of the next, so
            the model's token ids cannot be told apart.
    """
    messages, tools = demonstration.messages, demonstration.tools
    whole = renderer.render(messages, tools=tools).ids
    transcript: Transcript | None = None
    for turn, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = renderer.render(messages[:turn], tools=tools).ids
        if whole[: len(before)] != before:
            raise ValueError(
                f"the chat template writes the messages before message {turn} differently once "
                f"{message.content!r} follows; it cannot be imitated turn by turn"
            )
        if transcript is None:
            transcript = Transcript(before)
        else:
            transcript.observe(before[len(transcript) :])
        said = _up_to_stop(whole[len(before) :], renderer.stop_token_ids)
        chunk = TokenChunk(token_ids=said, logprobs=(0.0,) * len(said), weight_version=0)
        transcript.sample(Completion(chunks=(chunk,), finish=FinishReason.STOP))
    assert transcript is not None, "a demonstration ends with an assistant's turn"
    return transcript.freeze()


def _up_to_stop(ids: Sequence[int], stops: Sequence[int]) -> tuple[int, ...]:
    for index, token in enumerate(ids):
        if token in stops:
            return tuple(ids[: index + 1])
    raise ValueError(
        "the chat template ends an assistant's turn with none of the renderer's stop token ids "
        f"{stops}"
    )


def train_sequence(tokens: Tokens) -> TrainSequence:
    """Returns the ledger as training input: advantage 1 on what the model said, 0 elsewhere."""
    return TrainSequence(
        ids=tokens.ids,
        loss_mask=tokens.loss_mask,
        rollout_logprobs=tokens.logprobs,
        advantages=tuple(float(sampled) for sampled in tokens.loss_mask),
    )


def fine_tune(
    policy: PolicyBackend, batches: Iterable[Sequence[TrainSequence]]
) -> Iterator[StepStats]:
    """Takes one optimizer step per batch, on the mean loss over all of its sampled tokens.

    Args:
        policy: Stepped in place, with the optimizer and schedule of its configuration.
        batches: Consumed one per step; may be a generator.

    Yields:
        The statistics of each step.
    """
    loss = NegativeLogLikelihood()
    for batch in batches:
        yield policy.train_step(batch, loss, aggregation="token-mean")
