"""The metrics of one batch of trajectories.

Invariant: rates are shares of the trajectories that ended without error; failed ones are counted,
and excluded from all other numbers. A metric without any trajectory is absent, not zero.
All functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from treadle.agent_loop import Trajectory
from treadle.tools.rewards import WeightedRewards
from treadle.tracing import aggregate
from treadle.trainer.report.metrics import (
    REWARD,
    SAMPLED_TOKENS,
    TOOL_RATE,
    VAL_ACCURACY,
    VAL_REWARD,
    VAL_TOOL_RATE,
)
from treadle.trainer.report.spread import spread_metrics

if TYPE_CHECKING:
    from treadle.trainer.report.at_k import Interval

_ACCURACY_OF_REWARD = ("reward/accuracy", "reward/acc")
"""Named so by Treadle's rewards, and by the key that verl's rewards return."""


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of a training step's trajectories.

    Returns:
        `reward/mean`, `reward/min`, `reward/max`; `tool/call_rate`; `rollout/num_trajectories`,
        `rollout/num_failed`, `rollout/turns`, `rollout/samples`, `rollout/response_tokens` (means
        over trajectories), the share of each stop reason as `stop/<reason>`; `reward/tool` and
        `reward/turn`, the means over all calls and scored turns; `findings/<kind>`, how many of
        all trajectories have one; `tokens/sampled`, `tokens/observed`, `tokens/prompt` (sums);
        what loops and tools reported, combined by their own rules; and `spread_metrics`.
    """
    ended = [trajectory for trajectory in trajectories if trajectory.error is None]
    metrics = aggregate(trajectory.metrics for trajectory in ended)
    samples = [sample for trajectory in ended for sample in trajectory.samples]
    metrics["rollout/num_trajectories"] = float(len(trajectories))
    metrics["rollout/num_failed"] = float(len(trajectories) - len(ended))
    metrics[SAMPLED_TOKENS] = float(sum(t.num_sampled_tokens for t in ended))
    metrics["tokens/prompt"] = float(sum(s.num_prompt_tokens for s in samples))
    response = sum(len(s.response_ids) for s in samples)
    metrics["tokens/observed"] = response - metrics[SAMPLED_TOKENS]
    found = Counter(kind for t in trajectories for kind in {f.kind for f in t.findings})
    metrics |= {f"findings/{kind}": float(count) for kind, count in found.items()}
    if not ended:
        return metrics
    metrics |= spread_metrics(ended)
    metrics[TOOL_RATE] = _mean(ended, called_a_tool)
    metrics["rollout/turns"] = _mean(ended, lambda t: t.num_turns)
    metrics["rollout/samples"] = len(samples) / len(ended)
    metrics["rollout/response_tokens"] = response / len(ended)
    for stop, count in Counter(trajectory.stop for trajectory in ended).items():
        metrics[f"stop/{stop.value}"] = count / len(ended)
    for name, given in (
        ("reward/tool", [reward for t in ended for reward in t.tool_rewards]),
        ("reward/turn", [score for t in ended for score in t.turn_scores]),
    ):
        if given:
            metrics[name] = sum(given) / len(given)
    rewards = [trajectory.reward for trajectory in ended if trajectory.reward is not None]
    if rewards:
        metrics[REWARD] = sum(rewards) / len(rewards)
        metrics["reward/min"] = min(rewards)
        metrics["reward/max"] = max(rewards)
    return metrics


def validation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of a validation.

    A trajectory that failed counts as one of the worst, with 0 at most: otherwise a server that
    loses the hard ones would raise the numbers.

    Returns:
        `val/num_trajectories`, `val/num_failed`; unless all failed, `val/reward` (mean) and
        `val/tool_call_rate`; `val/accuracy` if every reward separates right from wrong: it is 0 or
        1 and no sum of several, or comes with the metric `reward/accuracy` or `reward/acc`. With
        several data sources, `val/reward/<source>` and `val/accuracy/<source>` too. With several
        samples per row, the values of `scores_at_k` for each source as `val/<source>/<name>`, and
        their bounds as `val/<source>/<name>/low` and `/high`.
    """
    failed = sum(trajectory.error is not None for trajectory in trajectories)
    metrics = {
        "val/num_trajectories": float(len(trajectories)),
        "val/num_failed": float(failed),
    }
    if failed == len(trajectories):  # no score says how bad a wrong answer is
        return metrics
    worst = worst_reward(trajectories)
    metrics |= _val_scores(trajectories, worst)
    metrics[VAL_TOOL_RATE] = _mean(trajectories, called_a_tool)
    sources = by_source(trajectories)
    if len(sources) > 1:
        for source, members in sources.items():
            scores = _val_scores(members, worst)
            metrics |= {f"{name}/{source}": value for name, value in scores.items()}
    for source, members in sources.items():
        for name, interval in scores_at_k(members, worst=worst).items():
            bounds = {"": interval.mean, "/low": interval.low, "/high": interval.high}
            metrics |= {f"val/{source}/{name}{b}": v for b, v in bounds.items() if v is not None}
    return metrics


def by_source(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Returns the trajectories by the `data_source` of their rows, in the order of the rows."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(str(trajectory.task.fields.get("data_source")), []).append(trajectory)
    return found


def by_row(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Returns the trajectories of each row, in the order of the rows."""
    rows: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        rows.setdefault(trajectory.task.task_id, []).append(trajectory)
    return list(rows.values())


def scores_at_k(trajectories: Sequence[Trajectory], *, worst: float) -> dict[str, Interval]:
    """Returns the scores of k samples of a row, if rows have several.

    Args:
        trajectories: Trajectories of one data source, or of all.
        worst: The reward that a failed one counts as.

    Returns:
        By `reward/<measure>` and, if the reward separates right from wrong, `accuracy/<measure>`.
        The measures are those of `at_k`, the majority for the accuracy if the reward reads
        answers. Empty for one sample per row.
    """
    rows = by_row(trajectories)
    if max(map(len, rows), default=0) < 2:
        return {}
    from treadle.trainer.report.at_k import at_k  # numpy is loaded where it is used

    rewards = [[worst if t.reward is None else t.reward for t in row] for row in rows]
    found = {f"reward/{name}": interval for name, interval in at_k(rewards).items()}
    right = right_answers(trajectories)
    if right is not None:
        values = [[right[id(t)] for t in row] for row in rows]
        answers = [[t.answer for t in row] for row in rows]
        votes = answers if any(a is not None for row in answers for a in row) else None
        found |= {f"accuracy/{name}": each for name, each in at_k(values, votes).items()}
    return found


def right_answers(trajectories: Sequence[Trajectory]) -> dict[int, float] | None:
    """Returns the accuracy of each trajectory by its id; None if a reward gives no accuracy.

    A trajectory that failed is a wrong answer; if all failed, the result is None.
    """
    right: dict[int, float] = {}
    for trajectory in trajectories:
        value = 0.0 if trajectory.error is not None else accuracy(trajectory)
        if value is None:
            return None
        right[id(trajectory)] = value
    return right if any(t.error is None for t in trajectories) else None


def _val_scores(trajectories: Sequence[Trajectory], worst: float) -> dict[str, float]:
    scores = {VAL_REWARD: _mean(trajectories, lambda t: worst if t.reward is None else t.reward)}
    right = right_answers(trajectories)
    if right is not None:
        scores[VAL_ACCURACY] = sum(right.values()) / len(trajectories)
    return scores


def worst_reward(trajectories: Sequence[Trajectory]) -> float:
    """Returns what a failed trajectory of a validation counts as: the least reward, 0 at most."""
    return min(
        (t.reward for t in trajectories if t.reward is not None and t.reward < 0), default=0.0
    )


def accuracy(trajectory: Trajectory) -> float | None:
    """Returns 1.0 for a right answer, 0.0 for a wrong one, None if the reward gives no accuracy.

    A sum of several rewards gives none: it may be 0 or 1 by chance.
    """
    if (reported := reported_accuracy(trajectory)) is not None:
        return reported
    if any(metric.name == WeightedRewards.SUMMED for metric in trajectory.metrics):
        return None
    return trajectory.reward if trajectory.reward in (0.0, 1.0) else None


def reported_accuracy(trajectory: Trajectory) -> float | None:
    """Returns the accuracy that the reward reported as a metric; None if it reported none."""
    for metric in trajectory.metrics:
        if metric.name in _ACCURACY_OF_REWARD:
            return metric.value
    return None


def ground_truth(trajectory: Trajectory) -> object:
    """Returns the right answer that the row names; None if it names none."""
    reward_model = trajectory.task.fields.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def called_a_tool(trajectory: Trajectory) -> bool:
    """True if the model wrote at least one well-formed call; the tool need not exist."""
    return bool(trajectory.exchange.tools_called)


def _mean(trajectories: Sequence[Trajectory], number: Callable[[Trajectory], float]) -> float:
    return sum(number(trajectory) for trajectory in trajectories) / len(trajectories)
