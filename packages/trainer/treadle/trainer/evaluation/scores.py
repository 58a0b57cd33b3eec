"""The scores of an evaluation, of all rows and per data source. All functions are pure.

Invariant: means are those of a validation (`report/rollout.py`): a trajectory that failed counts as
one of the worst, with 0 at most, and as a wrong answer. The uncertainty is that of the rows, since
the samples of one row are not independent.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.agent_loop import Trajectory
from treadle.trainer.report.at_k import Interval
from treadle.trainer.report.rollout import (
    by_row,
    by_source,
    called_a_tool,
    right_answers,
    scores_at_k,
    worst_reward,
)

__all__ = ["ALL", "Estimate", "Lengths", "Scores", "mean_over_rows", "pass_at_k", "score"]

ALL = "all"
"""The data source of the scores over all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its standard error, which is None for a single row."""

    mean: float
    standard_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of responses, in tokens, tool results included."""

    mean: float
    median: float
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of the rows of one data source.

    Attributes:
        data_source: The rows' `data_source`, or `ALL` of them.
        failed: Number of trajectories that failed.
        accuracy: Share of right answers, 0 to 1; None if the reward gives no accuracy.
        pass_at: k -> probability, 0 to 1, that one of k samples is a right answer, for k = 1, 2, 4
            and so on up to the samples per row; empty if `accuracy` is None.
        at_k: Scores of k samples of a row, by the names of `scores_at_k`; empty for one sample.
        tool_call_rate: Share of the trajectories, 0 to 1, that called a tool.
        turns: Mean number of turns of the trajectories that did not fail; None if all did.
        response_tokens: Lengths of the answers of trajectories that did not fail; None if all did.
        stops: Stop reason -> share, 0 to 1, of the trajectories that did not fail.
    """

    data_source: str
    rows: int
    samples: int
    failed: int
    reward: Estimate
    accuracy: Estimate | None
    pass_at: Mapping[int, float]
    at_k: Mapping[str, Interval]
    tool_call_rate: float
    turns: float | None
    response_tokens: Lengths | None
    stops: Mapping[str, float]


def score(trajectories: Sequence[Trajectory]) -> list[Scores]:
    """Returns the scores per data source, in the order of the rows, and those of all rows last."""
    worst = worst_reward(trajectories)
    parts = [*by_source(trajectories).items(), (ALL, trajectories)]
    return [_scores(source, members, worst) for source, members in parts]


def _scores(source: str, trajectories: Sequence[Trajectory], worst: float) -> Scores:
    rows = by_row(trajectories)
    ended = [trajectory for trajectory in trajectories if trajectory.error is None]
    lengths = [sum(len(s.response_ids) for s in trajectory.samples) for trajectory in ended]
    right = right_answers(trajectories)
    return Scores(
        data_source=source,
        rows=len(rows),
        samples=len(trajectories),
        failed=len(trajectories) - len(ended),
        reward=mean_over_rows(
            [[worst if t.reward is None else t.reward for t in row] for row in rows]
        ),
        accuracy=None
        if right is None
        else mean_over_rows([[right[id(t)] for t in r] for r in rows]),
        pass_at={} if right is None else _pass_at([[right[id(t)] for t in row] for row in rows]),
        at_k=scores_at_k(trajectories, worst=worst),
        tool_call_rate=sum(map(called_a_tool, trajectories)) / len(trajectories),
        turns=statistics.fmean(t.num_turns for t in ended) if ended else None,
        response_tokens=Lengths(
            mean=statistics.fmean(lengths), median=statistics.median(lengths), max=max(lengths)
        )
        if lengths
        else None,
        stops={
            reason.value: count / len(ended)
            for reason, count in Counter(t.stop for t in ended).most_common()
        },
    )


def mean_over_rows(values: Sequence[Sequence[float]]) -> Estimate:
    """Returns the mean of all values, and the standard error of the means of the rows.

    Args:
        values: The values of each row, [rows][samples]; the same number for each row.
    """
    means = [statistics.fmean(row) for row in values]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Estimate(mean=statistics.fmean(means), standard_error=error)


def _pass_at(rows: Sequence[Sequence[float]]) -> dict[int, float]:
    samples, k = min(map(len, rows)), 1
    found = {}
    while k <= samples:
        found[k] = statistics.fmean(
            pass_at_k(len(row), sum(value == 1 for value in row), k) for row in rows
        )
        k *= 2
    return found


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Returns the probability that k of the samples, drawn without replacement, have a success.

    This is the unbiased estimator of Chen et al. (2021), "Evaluating Large Language Models Trained
    on Code", equation 1.

    Args:
        samples: Number of samples of the row.
        successes: How many of them are right.
        k: How many are drawn, from 1 to `samples`.
    """
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)
