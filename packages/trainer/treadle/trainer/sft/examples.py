"""Demonstrations -> the sequences of each conversation, within the length limit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.agent_loop import ChatRenderer, FloatArray, RenderError, SetupError
from treadle.policy.client.types import TrainSequence
from treadle.trainer.config.sft import SftDataConfig
from treadle.trainer.data import DataError
from treadle.trainer.data.row_problems import RowProblems
from treadle.trainer.sft.conversations import PlacedDemonstration
from treadle.trainer.sft.transcribe import train_sequences, transcribe

__all__ = ["Example", "ExampleSet", "batch_of", "make_examples"]

Example = tuple[TrainSequence, ...]
"""The sequences of one conversation: one, unless the template rewrites history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSet:
    """The examples of a split.

    Attributes:
        examples: In the order of the conversations; at least one.
        notes: Lines to print at start.
    """

    examples: tuple[Example, ...]
    num_rewritten: int
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(sequence.ids) for example in self.examples for sequence in example)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens under the loss."""
        return sum(sequence.num_loss_tokens for example in self.examples for sequence in example)


def make_examples(
    conversations: Sequence[PlacedDemonstration],
    data: SftDataConfig,
    *,
    split: str,
    renderer: ChatRenderer,
) -> ExampleSet:
    """Transcribes conversations, and applies `data.max_length` and `data.truncation`.

    Args:
        split: Names the rows in messages: "train" or "val".

    Raises:
        DataError: The template refuses a conversation, one is too long and `data.truncation` is
            error, or none is left.
        SeveralProblems: There are several problems.
    """
    found = RowProblems(f"{split} rows")
    examples: list[Example] = []
    long: list[tuple[str, int]] = []
    lost = rewritten = 0
    for conversation in conversations:
        try:
            whole = train_sequences(transcribe(renderer, conversation.demonstration))
        except (RenderError, SetupError, ValueError) as error:
            found.add(conversation.place, f"the conversation cannot be trained on: {error}", error)
            continue
        rewritten += len(whole) > 1
        if (length := max(len(sequence.ids) for sequence in whole)) > data.max_length:
            long.append((conversation.place, length))
            if data.truncation != "right":
                continue
            whole = tuple(cut for each in whole if (cut := _cut(each, data.max_length)) is not None)
            if not whole:
                lost += 1
                continue
        examples.append(whole)
    found.raise_if_any()
    notes = _length_notes(long, lost, split, len(conversations), data)
    if rewritten:
        notes.append(
            f"{rewritten} of {len(conversations)} {split} conversations have several sequences: "
            "the chat template rewrites history, so each turn is trained on the prompt that "
            "inference would see"
        )
    if not examples:
        raise DataError(f"no {split} conversation is left: {'; '.join(notes)}")
    return ExampleSet(examples=tuple(examples), num_rewritten=rewritten, notes=tuple(notes))


def batch_of(examples: Sequence[Example]) -> tuple[TrainSequence, ...]:
    """Returns the sequences of a batch; those of one conversation count as one in the loss."""
    return tuple(
        sequence if len(example) == 1 else replace(sequence, trajectory=number)
        for number, example in enumerate(examples)
        for sequence in example
    )


def _cut(sequence: TrainSequence, length: int) -> TrainSequence | None:
    """Returns the first tokens, an image whole or not; None if none is under the loss."""
    length = min((i.start for i in sequence.images if i.start < length < i.stop), default=length)
    mask = sequence.loss_mask[:length]
    if not any(mask):
        return None
    logprobs = sequence.rollout_logprobs
    return replace(
        sequence,
        ids=sequence.ids[:length],
        loss_mask=mask,
        advantages=FloatArray(map(float, mask)),
        rollout_logprobs=None if logprobs is None else logprobs[:length],
        images=tuple(placed for placed in sequence.images if placed.stop <= length),
    )


def _length_notes(
    long: Sequence[tuple[str, int]], lost: int, split: str, num_rows: int, data: SftDataConfig
) -> list[str]:
    if not long:
        return []
    place, length = long[0]
    found = (
        f"{len(long)} of {num_rows} {split} conversations are longer than {data.max_length} "
        f"tokens; the first is {place} ({length} tokens), the longest has "
        f"{max(length for _, length in long)}"
    )
    match data.truncation:
        case "error":
            raise DataError(
                f"{found}. Raise data.max_length, leave them out with data.truncation=drop, or cut "
                "them with data.truncation=right"
            )
        case "drop":
            return [f"left out: {found}"]
        case "right":
            gone = f"; {lost} of them have nothing left to learn and are left out" if lost else ""
            return [f"cut at {data.max_length} tokens: {found}{gone}"]
