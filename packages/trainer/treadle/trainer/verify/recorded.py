"""The recorded trajectories of a step, as the groups that were trained on.

Ids, spans, log-probabilities, rewards and versions are those of the Parquet file. Messages, images
and experts are left out: nothing that is computed again needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from treadle.agent_loop import (
    AgentTask,
    Finding,
    Message,
    Origin,
    RolloutError,
    SampleReward,
    Span,
    StopReason,
    Tokens,
    Trajectory,
)
from treadle.tracing.trajectories.schema import LEFT_OUT_KEY
from treadle.trainer.training_loop.groups import Group, groups_of

__all__ = ["RecordError", "RecordedStep", "read_step"]

_COLUMNS = (
    *("task_id", "rollout_index", "loop", "reward", "advantage", "stop", "error"),
    *("sample_rewards", "tool_rewards", "turn_scores", "findings", "num_turns"),
    *("num_tokens", "num_sampled_tokens", "samples"),
)


class RecordError(ValueError):
    """A file of trajectories cannot be read or contradicts itself; the message names the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The trajectories of a step.

    Attributes:
        rows: The columns of each trajectory, in the order of the file.
        is_whole: Whether the file has all of them; a run leaves some out once its budget is spent.
    """

    rows: Sequence[Mapping[str, Any]]
    groups: Sequence[Group]
    is_whole: bool

    def of_tokens(self, name: str) -> NDArray[np.float32]:
        """Returns one of the columns of samples at all sampled tokens that were trained on."""
        found = [
            np.asarray(sample[name], dtype=np.float32)[~np.isnan(sample["logprobs"])]
            for row in self.rows
            for sample in row["samples"]
            if sample[name] is not None
        ]
        return np.concatenate(found) if found else np.zeros(0, np.float32)


def read_step(path: Path) -> RecordedStep:
    """Returns the trajectories in a file of a training step.

    Raises:
        RecordError: A value contradicts another one, or the file cannot be read.
    """
    try:
        table = pq.read_table(path, columns=list(_COLUMNS))
        rows = table.to_pylist()
        left_out = int((table.schema.metadata or {}).get(LEFT_OUT_KEY, b"0"))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise RecordError(f"cannot be read: {error}") from None
    trajectories = []
    for number, row in enumerate(rows):
        try:
            trajectories.append(_trajectory(row))
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise RecordError(f"row {number} (task {row['task_id']!r}): {error}") from None
    return RecordedStep(rows=rows, groups=groups_of(trajectories), is_whole=not left_out)


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    samples = tuple(_tokens(sample) for sample in row["samples"])
    for name, found in (
        ("num_tokens", sum(len(sample.ids) for sample in samples)),
        ("num_sampled_tokens", sum(sample.num_sampled_tokens for sample in samples)),
    ):
        if row[name] != found:
            raise ValueError(f"{name} is {row[name]}, and its samples have {found}")
    task = AgentTask(
        task_id=row["task_id"],
        sample_index=0,
        rollout_index=row["rollout_index"],
        loop=row["loop"],
        messages=(Message(role="user", content=""),),
    )
    stop, error = StopReason(row["stop"]), row["error"]
    return Trajectory(
        task=task,
        samples=samples,
        messages=(),
        stop=stop,
        assistant_turns=row["num_turns"] - 1,
        reward=row["reward"],
        sample_rewards=tuple(SampleReward(**each) for each in row["sample_rewards"] or ()),
        tool_rewards=tuple(row["tool_rewards"]),
        turn_scores=tuple(row["turn_scores"]),
        findings=tuple(Finding(**each) for each in row["findings"]),
        error=None if error is None else RolloutError(error),
    )


def _tokens(sample: Mapping[str, Any]) -> Tokens:
    length = len(sample["ids"])
    spans = tuple(_spans(sample["spans"], length))
    mask = np.zeros(length, dtype=bool)
    for span in spans:
        mask[span.start : span.stop] = span.origin is Origin.SAMPLED
    logprobs = np.array(sample["logprobs"], dtype=np.float32)
    for name in ("logprobs", "policy_logprobs", "entropy", "advantages"):
        values = sample[name]
        if values is None:
            continue
        if len(values) != length:
            raise ValueError(f"{length} ids have {len(values)} {name}")
        known = ~np.isnan(np.array(values, dtype=np.float32))
        if (known & ~mask).any() or (name in ("logprobs", "advantages") and (mask & ~known).any()):
            raise ValueError(f"{name} are not those of the sampled tokens")
    return Tokens(ids=sample["ids"], logprobs=np.where(mask, logprobs, 0).tolist(), spans=spans)


def _spans(given: Iterable[Mapping[str, Any]], length: int) -> Iterator[Span]:
    """Yields the spans, which must tile the tokens."""
    end = 0
    for span in given:
        if span["start"] != end or span["stop"] <= end:
            raise ValueError(f"a span is {span['start']} to {span['stop']}, after one to {end}")
        end = span["stop"]
        yield Span(
            origin=Origin(span["origin"]),
            start=span["start"],
            stop=end,
            weight_version=span["weight_version"],
        )
    if end != length:
        raise ValueError(f"the spans end at {end}, and there are {length} ids")
