"""Supervised fine-tuning: demonstrations, trained on with the policy's own train step.

A `Demonstration` is a finished conversation. It becomes the same token ledger that a rollout would
have written had the model said exactly that: an assistant's turn is sampled (loss mask True, its
end-of-turn id included), everything else is prompt or observed (loss mask False). So there is one
definition of "what the model said" for imitation and for reinforcement, and a model warm-started
here meets no token in its first rollout that it has not been trained to expect.

Everything is a pure function of its arguments except `fine_tune`, which steps the policy; like
`PolicyBackend.train_step` it is collective. Nothing waits.

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
        tools: What the model is told about.

    Raises:
        ValueError: The conversation is empty, or does not end with an assistant's turn, or opens
            with one, or two assistant's turns follow each other.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()

    def __post_init__(self) -> None:
        """Checks the order of the roles."""
        roles = [message.role for message in self.messages]
        if not roles or roles[-1] != "assistant":
            raise ValueError(
                f"a demonstration ends with an assistant's turn; its roles are {roles}"
            )
        previous = "assistant"
        for role in roles:
            if role == previous == "assistant":
                raise ValueError(
                    f"an assistant's turn answers another role's message; the roles are {roles}"
                )
            previous = role


def transcribe(renderer: ChatRenderer, demonstration: Demonstration) -> Tokens:
    """Writes the ledger of a rollout in which the model said what the demonstration says.

    A turn ends with its first stop id, as it would have ended the completion.

    Args:
        renderer: Of the model to be trained.
        demonstration: The conversation.

    Returns:
        The ledger; its log-probabilities are 0.0, its weight version 0: nobody sampled it.

    Raises:
        ValueError: The renderer's template does not write the conversation as a sequence of
            turns, each a prefix of the next, so there is no saying which ids are the model's.
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
        f"the chat template ends an assistant's turn with none of the renderer's stop ids {stops}"
    )


def train_sequence(tokens: Tokens) -> TrainSequence:
    """The ledger as training input: advantage 1 on what the model said, 0 elsewhere."""
    return TrainSequence(
        ids=tokens.ids,
        loss_mask=tokens.loss_mask,
        rollout_logprobs=tokens.logprobs,
        advantages=tuple(float(sampled) for sampled in tokens.loss_mask),
    )


def fine_tune(
    policy: PolicyBackend, batches: Iterable[Sequence[TrainSequence]]
) -> Iterator[StepStats]:
    """One optimizer step per batch on the mean loss over all of its sampled tokens.

    Args:
        policy: Stepped in place; its optimizer and schedule are its own configuration's.
        batches: Taken one at a time, as the steps are taken; may be a generator.

    Yields:
        The statistics of each step, after it.
    """
    loss = NegativeLogLikelihood()
    for batch in batches:
        yield policy.train_step(batch, loss, aggregation="token-mean")
