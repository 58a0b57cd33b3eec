"""Metrics of k samples of a row: mean@n, best@k, worst@k and maj@k, with intervals over the rows.

Invariant: the numbers depend neither on the order of a row's samples nor on anything but their
values; two calls give the same bits. All functions are pure.

The definitions are those of verl's validation (`process_validation_metrics`): k samples are drawn
with replacement from the n that a row has. verl draws a thousand times; the expected best and worst
of k draws have a closed form, which is used here. The majority has none that is short, so it is
drawn, with verl's number of draws and seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

DRAWS: Final = 1000
"""Number of draws of a majority, and of resamplings of the rows."""
SEED: Final = 42
"""Seed of the draws and of the resamplings."""
CONFIDENCE: Final = 0.95
"""Probability that an interval covers the mean over all rows that there could be."""

_AT_ONCE: Final = 100_000
"""Number of rows that are resampled at a time, which bounds the memory."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over rows with the bounds of its interval, which are None for a single row."""

    mean: float
    low: float | None
    high: float | None


def sizes(samples: int) -> list[int]:
    """Returns verl's k for `samples` samples per row: 2, 4, 8 and so on below it, then all."""
    found = []
    k = 2
    while k < samples:
        found.append(k)
        k *= 2
    return [*found, samples] if samples > 1 else []


def at_k(
    values: Sequence[Sequence[float]], answers: Sequence[Sequence[str | None]] | None = None
) -> dict[str, Interval]:
    """Returns `mean@n`, and for each k of `sizes(n)` `best@k`, `worst@k` and `maj@k`.

    Args:
        values: The score of each sample, [rows][n]; at least one row.
        answers: The answer of each sample, [rows][n]; None: it gave no answer, and has no vote. No
            sequence: no majority.

    Raises:
        ValueError: Rows have different numbers of samples.
    """
    counts = {len(row) for row in values}
    if len(counts) != 1:
        raise ValueError(f"rows must have the same number of samples, got {sorted(counts)}")
    [samples] = counts
    named = {f"mean@{samples}": [float(np.mean(np.sort(row))) for row in values]}
    for k in sizes(samples):
        named[f"best@{k}"] = [expected_best(row, k) for row in values]
        named[f"worst@{k}"] = [-expected_best([-value for value in row], k) for row in values]
    if answers is not None:
        generator = np.random.default_rng(SEED)
        for k in sizes(samples):
            named[f"maj@{k}"] = [
                expected_majority(row, votes, k, generator)
                for row, votes in zip(values, answers, strict=True)
            ]
    return dict(zip(named, _intervals(np.array(list(named.values()))), strict=True))


def expected_best(values: Sequence[float], k: int) -> float:
    """Returns the expected maximum of k draws with replacement.

    The i-th smallest of n values is the maximum with the probability (i/n)^k - ((i-1)/n)^k.
    """
    steps = (np.arange(len(values) + 1) / len(values)) ** k
    return float(np.sort(np.asarray(values, dtype=np.float64)) @ np.diff(steps))


def expected_majority(
    values: Sequence[float],
    answers: Sequence[str | None],
    k: int,
    generator: np.random.Generator,
) -> float:
    """Returns the mean score of the answer that most of k draws with replacement give.

    Answers that share the first place count with the mean of their scores; verl takes the one that
    was drawn first. Where no draw has an answer, the score is 0.

    Args:
        values: The score of each sample; that of an answer is the mean over its samples.
        answers: The answer of each sample; None has no vote.
        generator: Draws `DRAWS` times k samples.
    """
    voted = sorted({answer for answer in answers if answer is not None})
    if not voted:
        return 0.0
    given = [[v for v, a in zip(values, answers, strict=True) if a == answer] for answer in voted]
    scores = np.array([np.mean(np.sort(of_answer)) for of_answer in given])
    shares = np.array([len(of_answer) / len(answers) for of_answer in given])
    silent = max(0.0, 1.0 - float(shares.sum()))
    votes = generator.multinomial(k, [*shares, silent], size=DRAWS)[:, :-1]
    most = votes.max(axis=1, keepdims=True)
    winners = (votes == most) & (most > 0)
    return float(np.mean((winners @ scores) / np.maximum(1, winners.sum(axis=1))))


def _intervals(values: Floats) -> list[Interval]:
    """Returns the interval of each line of `values`, [lines, rows].

    The bounds are quantiles of the means of `DRAWS` resamplings of the rows with replacement: the
    percentile bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter
    13). Rows and not samples are resampled, since samples of one row are not independent.
    """
    means, rows = values.mean(axis=1), values.shape[1]
    if rows == 1:
        return [Interval(mean=float(mean), low=None, high=None) for mean in means]
    generator = np.random.default_rng(SEED)
    size = max(1, _AT_ONCE // rows)
    resampled = np.concatenate(
        [
            values[:, generator.integers(rows, size=(min(size, DRAWS - done), rows))].mean(axis=2)
            for done in range(0, DRAWS, size)
        ],
        axis=1,
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail], axis=1)
    return [
        Interval(mean=float(m), low=float(a), high=float(b))
        for m, a, b in zip(means, low, high, strict=True)
    ]
