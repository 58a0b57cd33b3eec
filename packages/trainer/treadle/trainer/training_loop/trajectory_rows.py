"""Rows of the trajectory files, made of trajectories and of what a step did with them.

Invariant: a row has the columns of `treadle.tracing.trajectories.SCHEMA`. A value per token is NaN
where it does not apply: log-probabilities where the token was not sampled, those of the policy and
the entropy where the sequence did not go through the model.

Making rows of a large step takes seconds; the caller chooses the thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treadle.agent_loop import BoolArray, IntArray, Tokens, Trajectory
from treadle.policy.client.types import TokenValues, TrainSequence
from treadle.tracing import FinishedSpan
from treadle.tracing.trajectories import SpanColumns
from treadle.tracing.trajectories.schema import SNIPPET_CHARACTERS
from treadle.trainer.report.rollout import ground_truth
from treadle.trainer.report.trajectories import (
    Decode,
    Phase,
    spans_by_trajectory,
    to_fields,
    to_sample_rewards,
    to_spans,
)
from treadle.trainer.rollout.workers.stored_text import StoredText, stored_text, to_json
from treadle.trainer.rollout.workers.trajectory_codec import PackedMessages

if TYPE_CHECKING:
    from treadle.trainer.training_loop.groups import StepBatch

__all__ = ["make_rows"]

Floats = NDArray[np.float32]


def make_rows(
    trajectories: Sequence[Trajectory],
    *,
    step: int,
    phase: Phase,
    decode: Decode,
    spans: Iterable[FinishedSpan] = (),
    batch: StepBatch | None = None,
    tokens: TokenValues | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the row of each trajectory.

    Args:
        step: The step that they belong to; 0 before training.
        decode: For the text of the token spans.
        spans: Spans recorded while they were sampled; each row gets its own part.
        batch: The step's training batch; None: there is none.
        tokens: Numbers that the policy's update computed of the batch; None: there was no update.
    """
    traces = spans_by_trajectory(spans)
    values: dict[int, list[_Values]] = {}
    advantages: Sequence[float | None] = [None] * len(trajectories)
    if batch is not None:
        values = _values_by_trajectory(batch, tokens)
        advantages = batch.advantages_of(trajectories)
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        trace = traces.get((trajectory.task.task_id, trajectory.task.rollout_index), [])
        fields = to_fields(trajectory, step=step, phase=phase, advantage=advantage, trace=trace)
        of_samples = values.get(id(trajectory), [_Values()] * len(trajectory.samples))
        text = _text(trajectory, decode)
        samples = [
            _sample(sample, given, _spans(sample, decode, *of_spans))
            for sample, given, of_spans in zip(
                trajectory.samples, of_samples, text.spans, strict=True
            )
        ]
        rewards = to_sample_rewards(trajectory) or None
        row = fields | _columns(trajectory, fields, trace, text)
        row |= {"samples": samples, "sample_rewards": rewards}
        yield {name: _printable(value) for name, value in row.items()}


def _text(trajectory: Trajectory, decode: Decode) -> StoredText:
    """Returns what the worker of a trajectory has made, or makes it."""
    source = trajectory.source
    made = source.text() if isinstance(source, PackedMessages) else None
    if made is not None:
        return made
    return stored_text(trajectory, decode, response_characters=SNIPPET_CHARACTERS)


def _sample(sample: Tokens, given: _Values, spans: object) -> dict[str, Any]:
    mask = sample.loss_mask
    return {
        "ids": np.asarray(sample.ids, dtype=np.int32),
        "spans": spans,
        "logprobs": _at(mask, _sampled(sample, mask)),
        "policy_logprobs": _at(mask, given.logprobs),
        "entropy": _at(mask, given.entropy),
        "advantages": _at(mask, given.advantages),
    }


def _spans(sample: Tokens, decode: Decode, text: bytes, begins: IntArray) -> object:
    """Returns the spans of a sample with their text."""
    table = sample.span_table
    if table is None:
        return to_spans(sample, decode)
    origins, starts, stops, versions = table.columns
    return SpanColumns(
        origins=origins.data,
        starts=starts.data,
        stops=stops.data,
        versions=versions.data,
        text=text,
        begins=begins.data,
    )


def _columns(
    trajectory: Trajectory,
    fields: Mapping[str, Any],
    trace: Sequence[FinishedSpan],
    text: StoredText,
) -> dict[str, Any]:
    """Returns the columns that are not fields of a record, or otherwise."""
    truth, source = ground_truth(trajectory), fields["data_source"]
    asked = [m.content for m in trajectory.task.messages if m.role == "user"]
    return {
        "data_source": None if source is None else str(source),
        "ground_truth": truth if truth is None or isinstance(truth, str) else to_json(truth),
        "num_tokens": sum(len(sample.ids) for sample in trajectory.samples),
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "duration_s": _duration_s(trace),
        "prompt": asked[-1][:SNIPPET_CHARACTERS] if asked else "",
        "response": text.response,
        "tools": list(trajectory.exchange.tools_called),
        "drift": sum(finding.kind == "drift" for finding in trajectory.findings),
        "messages": text.messages,
        "trace": [{**span, "attributes": to_json(span["attributes"])} for span in fields["trace"]],
    }


def _duration_s(trace: Sequence[FinishedSpan]) -> float | None:
    """Returns the time from the first attempt's start to the last one's end."""
    attempts = [span for span in trace if span.name == "trajectory"]
    if not attempts:
        return None
    ends = [span.start_unix_ns + span.duration_ns for span in attempts]
    return (max(ends) - min(span.start_unix_ns for span in attempts)) / 1e9


# --- values per token ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    """Values of the loss tokens of one sample; None: it was not trained on, or not computed."""

    advantages: Floats | None = None
    logprobs: Floats | None = None
    entropy: Floats | None = None


def _values_by_trajectory(batch: StepBatch, tokens: TokenValues | None) -> dict[int, list[_Values]]:
    """Returns the values of each sample of the members of a batch, by the id of the member.

    Sequences are in the order of the members and their samples; a sample without sampled tokens has
    none.
    """
    sequences = iter(batch.sequences)
    found: dict[int, list[_Values]] = {}
    begin = 0
    for member in batch.members:
        of_samples = found[id(member)] = []
        for sample in member.samples:
            if not sample.num_sampled_tokens:
                of_samples.append(_Values())
                continue
            sequence = next(sequences)
            end = begin + sequence.num_loss_tokens
            of_samples.append(_values(sequence, tokens, slice(begin, end)))
            begin = end
    return found


def _values(sequence: TrainSequence, tokens: TokenValues | None, part: slice) -> _Values:
    return _Values(
        advantages=sequence.at_loss_tokens("advantages"),
        logprobs=None if tokens is None else tokens.logprobs_M[part],
        entropy=None if tokens is None else tokens.entropy_M[part],
    )


def _sampled(sample: Tokens, mask: BoolArray) -> Floats:
    """Returns the log-probabilities of the sampled tokens."""
    at = np.asarray(mask, dtype=bool)
    sampled: Floats = np.asarray(sample.logprobs, dtype=np.float32)[at]
    return sampled


def _at(mask: BoolArray, values: Floats | None) -> Floats | None:
    """Returns the values where the mask is set, NaN elsewhere."""
    if values is None:
        return None
    placed = np.full(len(mask), np.nan, dtype=np.float32)
    placed[np.asarray(mask, dtype=bool)] = values
    return placed


# --- text ----------------------------------------------------------------------------------------


def _printable(value: Any) -> Any:
    """Returns plain data whose strings are UTF-8: half a surrogate pair becomes its escape."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value
