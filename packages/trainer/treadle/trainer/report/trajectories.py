"""The trajectory log: `trajectories.jsonl`, a few whole groups of the trajectories of each step.

Invariant: a line holds everything about one trajectory, so that it can be read without the run:
task, messages, the tokens' text by who wrote them, spans, reward, stop, metrics; the lines of a
group (all attempts at one row) follow one another. A run that resumes
after step s removes later lines, as the metrics log does. The driver writes, from one task.

A line: {"step", "phase": "train" | "val", "task_id", "rollout_index", "loop", "data_source",
"ground_truth", "reward", "answer", "advantage", "tool_rewards", "turn_scores", "stop", "error",
"traceback", "num_turns", "messages", "sample_rewards": [{"player", "value"}],
"samples": [{"ids", "logprobs", "spans": [{"origin", "start", "stop", "weight_version", "text"}]}],
"findings": [{"kind", "text"}], "metrics", "trace"}. The messages are those of the last sample.
"advantage" is null where the trajectory was not trained on, a log-probability where none is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Literal, Self

from treadle.agent_loop import Tokens, Trajectory
from treadle.agent_loop.span_content import messages_content
from treadle.tracing import (
    Fanout,
    FinishedSpan,
    MemorySink,
    aggregate,
    current_sink,
    plain,
    use_sink,
)
from treadle.trainer.report.failures import whole_traceback
from treadle.trainer.report.rollout import ground_truth
from treadle.trainer.report.terminal.lines import keep_lines

Phase = Literal["train", "val"]
Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


class TrajectoryLog:
    """Appends to `path`, which is created with its directory.

    Args:
        decode: For the text of the token spans; None: spans carry no text.
        resume_after: See `MetricsLog`; None begins a new file.
    """

    def __init__(
        self, path: Path, *, decode: Decode | None = None, resume_after: int | None = None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_after is not None:
            keep_lines(path, resume_after)
        self._decode = decode
        self._file: BinaryIO = path.open("wb" if resume_after is None else "ab", buffering=0)

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Keeps what is traced in this block, beside where it goes anyway, for `append`."""
        recorded = Recorded()
        with use_sink(Fanout(current_sink(), recorded)):
            yield recorded

    def append(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        *,
        phase: Phase,
        limit: int,
        advantages: Sequence[float | None] | None = None,
        spans: Iterable[FinishedSpan] = (),
    ) -> int:
        """Writes whole groups of the trajectories, as few as hold `limit` of them.

        Args:
            step: The step that they belong to; 0 before training.
            trajectories: All of the step or validation.
            limit: See `choose` for which groups are written.
            advantages: One per trajectory: what it was trained with, None if it was left out. No
                sequence: they are not trained on.
            spans: Spans that were recorded while they were sampled; each line gets its own part.

        Returns:
            How many were written.

        Raises:
            OSError: The disk is full or gone.
        """
        traces = spans_by_trajectory(spans)
        trained: dict[int, float | None] = {}
        if advantages is not None:
            trained |= zip(map(id, trajectories), advantages, strict=True)
        chosen = choose(trajectories, limit)
        for trajectory in chosen:
            key = (trajectory.task.task_id, trajectory.task.rollout_index)
            record = to_record(
                trajectory,
                step=step,
                phase=phase,
                decode=self._decode,
                advantage=trained.get(id(trajectory)),
                trace=traces.get(key, ()),
            )
            # Rows may hold what JSON does not: dates in a parquet column, half a surrogate pair.
            line = json.dumps(record, ensure_ascii=False, default=str)
            self._file.write(line.encode(errors="backslashreplace") + b"\n")
        return len(chosen)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class Recorded(MemorySink):
    """Keeps spans without what they were given and returned."""

    def record(self, span: FinishedSpan) -> None:
        """Keeps the outline of `span`."""
        super().record(outline(span))

    def take(self, keys: Container[tuple[object, object]]) -> list[FinishedSpan]:
        """Returns the spans of trajectories that have ended, and forgets them.

        Args:
            keys: (task id, rollout index) of the trajectories.
        """
        by_trajectory = spans_by_trajectory(self._spans)
        taken = [s for key, spans in by_trajectory.items() if key in keys for s in spans]
        forgotten = {span.span_id for span in taken}
        self._spans = [span for span in self._spans if span.span_id not in forgotten]
        return taken


def outline(span: FinishedSpan) -> FinishedSpan:
    """Returns a span without `inputs` and `output`: the line of its trajectory has the messages."""
    kept = {k: v for k, v in span.attributes.items() if k not in ("inputs", "output")}
    return replace(span, attributes=MappingProxyType(kept))


def choose(trajectories: Sequence[Trajectory], limit: int) -> list[Trajectory]:
    """Whole groups of the trajectories, as few as hold `limit` of them.

    One group: of those with failures, or else of all, the one whose rewards differ most. Several:
    evenly over the range from groups with failures over the worst to the best mean reward; both
    ends of that range are always among them, and equal ones keep their order.
    """
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.task.task_id, []).append(trajectory)
    largest = max(map(len, groups.values()), default=1)
    count = -(-limit // largest)
    if count >= len(groups):
        return list(trajectories)
    if count == 1:
        return max(groups.values(), key=_interest)
    ranked = sorted(groups.values(), key=_rank)
    wanted = [ranked[i * (len(ranked) - 1) // (count - 1)] for i in range(count)]
    return [trajectory for group in wanted for trajectory in group]


def _interest(group: Sequence[Trajectory]) -> tuple[bool, float]:
    rewards = [t.reward for t in group if t.reward is not None]
    return any(t.error for t in group), max(rewards, default=0.0) - min(rewards, default=0.0)


def _rank(group: Sequence[Trajectory]) -> tuple[bool, float]:
    rewards = [t.reward for t in group if t.reward is not None]
    return all(t.error is None for t in group), sum(rewards) / max(1, len(rewards))


def to_record(
    trajectory: Trajectory,
    *,
    step: int,
    phase: Phase,
    decode: Decode | None,
    advantage: float | None = None,
    trace: Iterable[FinishedSpan] = (),
) -> dict[str, object]:
    """Returns one trajectory as plain data, ready for JSON; see the module for its keys."""
    fields = to_fields(trajectory, step=step, phase=phase, advantage=advantage, trace=trace)
    samples = [_tokens(sample, decode) for sample in trajectory.samples]
    return fields | {
        "messages": messages_content(trajectory.messages),
        "sample_rewards": to_sample_rewards(trajectory),
        "samples": samples,
    }


def to_sample_rewards(trajectory: Trajectory) -> list[dict[str, object]]:
    """Returns the rewards of the players of a trajectory, one per sample; else none."""
    return [{"player": r.player, "value": r.value} for r in trajectory.sample_rewards]


def to_fields(
    trajectory: Trajectory,
    *,
    step: int,
    phase: Phase,
    advantage: float | None,
    trace: Iterable[FinishedSpan],
) -> dict[str, Any]:
    """Returns what `to_record` has beside messages and samples."""
    task = trajectory.task
    return {
        "step": step,
        "phase": phase,
        "task_id": task.task_id,
        "rollout_index": task.rollout_index,
        "loop": task.loop,
        "data_source": task.fields.get("data_source"),
        "ground_truth": ground_truth(trajectory),
        "reward": trajectory.reward,
        "answer": trajectory.answer,
        "advantage": advantage,
        "tool_rewards": list(trajectory.tool_rewards),
        "turn_scores": list(trajectory.turn_scores),
        "stop": trajectory.stop.value,
        "error": None
        if trajectory.error is None
        else f"{type(trajectory.error).__name__}: {trajectory.error}",
        "traceback": None if trajectory.error is None else whole_traceback(trajectory.error),
        "num_turns": trajectory.num_turns,
        "findings": [{"kind": f.kind, "text": f.text} for f in trajectory.findings],
        "metrics": aggregate([trajectory.metrics]),
        "trace": [_span(span) for span in trace],
    }


def _tokens(tokens: Tokens, decode: Decode | None) -> dict[str, object]:
    return {
        "ids": list(tokens.ids),
        "logprobs": [
            round(logprob, 4) if math.isfinite(logprob) else None for logprob in tokens.logprobs
        ],
        "spans": to_spans(tokens, decode),
    }


def to_spans(tokens: Tokens, decode: Decode | None) -> list[dict[str, object]]:
    """Returns the spans of a sample as plain data."""
    return [
        {
            "origin": span.origin.value,
            "start": span.start,
            "stop": span.stop,
            "weight_version": span.weight_version,
            "text": None if decode is None else decode(tokens.ids[span.start : span.stop]),
        }
        for span in tokens.spans
    ]


def spans_by_trajectory(
    spans: Iterable[FinishedSpan],
) -> dict[tuple[object, object], list[FinishedSpan]]:
    """Spans by (task id, rollout index) of the trajectory above them, in the order they began.

    Not by trace: a span around the whole step would make one trace of all its trajectories.
    """
    by_id = {span.span_id: span for span in spans}
    found: dict[tuple[object, object], list[FinishedSpan]] = {}
    for span in by_id.values():
        above: FinishedSpan | None = span
        while above is not None and above.name != "trajectory":
            above = by_id.get(above.parent_id or "")
        if above is not None:
            key = (above.attributes.get("task_id"), above.attributes.get("rollout_index"))
            found.setdefault(key, []).append(span)
    for trace in found.values():
        trace.sort(key=lambda span: span.start_unix_ns)
    return found


def _span(span: FinishedSpan) -> dict[str, object]:
    return {
        "name": span.name,
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "start_unix_ns": span.start_unix_ns,
        "duration_ns": span.duration_ns,
        "attributes": plain(span.attributes),
        "error": None if span.error is None else f"{span.error.type}: {span.error.message}",
    }
