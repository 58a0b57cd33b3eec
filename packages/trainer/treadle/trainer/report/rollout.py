"""The metrics of one batch of trajectories.

Invariant: rates are shares of the trajectories that ended without error; failed ones are counted,
and excluded from all other numbers. A metric without any trajectory is absent, not zero.
All functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from treadle.agent_loop import Trajectory
from treadle.tracing import aggregate
from treadle.trainer.report.metrics import (
    REWARD,
    SAMPLED_TOKENS,
    TOOL_RATE,
    VAL_ACCURACY,
    VAL_REWARD,
    VAL_TOOL_RATE,
)

_ACCURACY_OF_REWARD = ("reward/accuracy", "reward/acc")
"""Named so by Treadle's rewards, and by the key that verl's rewards return."""


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of a training step's trajectories.

    Returns:
        `reward/mean`, `reward/min`, `reward/max`; `tool/call_rate`; `rollout/num_trajectories`,
        `rollout/num_failed`, `rollout/turns`, `rollout/samples`, `rollout/response_tokens` (means
        over trajectories), the share of each stop reason as `stop/<reason>`; `reward/tool` and
        `reward/turn`, the means over all calls and scored turns; `findings/<kind>`, how many of
        all trajectories have one; `tokens/sampled`, `tokens/observed`, `tokens/prompt` (sums); and
        what loops and tools reported, combined by their own rules.
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
        `val/reward` (mean), `val/tool_call_rate`, `val/num_trajectories`, `val/num_failed`;
        `val/accuracy` where every reward tells right from wrong: it is 0 or 1, or comes with the
        metric `reward/accuracy` or `reward/acc`. With several data sources, `val/reward/<source>`
        and `val/accuracy/<source>` too.
    """
    failed = sum(trajectory.error is not None for trajectory in trajectories)
    metrics = {
        "val/num_trajectories": float(len(trajectories)),
        "val/num_failed": float(failed),
    }
    worst = worst_reward(trajectories)
    if trajectories:
        metrics |= _val_scores(trajectories, worst)
        metrics[VAL_TOOL_RATE] = _mean(trajectories, called_a_tool)
    by_source: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_source.setdefault(str(trajectory.task.fields.get("data_source")), []).append(trajectory)
    if len(by_source) > 1:
        for source, members in by_source.items():
            scores = _val_scores(members, worst)
            metrics |= {f"{name}/{source}": value for name, value in scores.items()}
    return metrics


def _val_scores(trajectories: Sequence[Trajectory], worst: float) -> dict[str, float]:
    scores = {VAL_REWARD: _mean(trajectories, lambda t: worst if t.reward is None else t.reward)}
    right = [accuracy(trajectory) for trajectory in trajectories if trajectory.error is None]
    known = [value for value in right if value is not None]
    if known and len(known) == len(right):
        scores[VAL_ACCURACY] = sum(known) / len(trajectories)
    return scores


def worst_reward(trajectories: Sequence[Trajectory]) -> float:
    """Returns what a failed trajectory of a validation counts as: the least reward, 0 at most."""
    return min(
        (t.reward for t in trajectories if t.reward is not None and t.reward < 0), default=0.0
    )


def accuracy(trajectory: Trajectory) -> float | None:
    """Returns 1.0 for a right answer, 0.0 for a wrong one, None where the reward does not tell."""
    for metric in trajectory.metrics:
        if metric.name in _ACCURACY_OF_REWARD:
            return metric.value
    return trajectory.reward if trajectory.reward in (0.0, 1.0) else None


def called_a_tool(trajectory: Trajectory) -> bool:
    """True if the model wrote at least one well-formed call; the tool need not exist."""
    given = len(trajectory.task.messages)
    return any(message.tool_calls for message in trajectory.messages[given:])


def _mean(trajectories: Sequence[Trajectory], number: Callable[[Trajectory], float]) -> float:
    return sum(number(trajectory) for trajectory in trajectories) / len(trajectories)
