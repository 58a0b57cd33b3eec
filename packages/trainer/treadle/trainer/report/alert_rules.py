"""The alerts: signs in the metrics of a run that does not learn, one rule each.

Invariant: a rule is a pure function of the last training steps, oldest first; it returns the text
of an alert for the last one, or None, also if a metric is missing. `Watch` (in `warning_signs`)
applies the table after each step, and decides how often an alert is reported.

Thresholds come from runs of the demo, with three seeds (which raise no alert) and with a learning
rate that makes it collapse, and from the limits of docs/troubleshooting.md. The scale of rewards
differs from run to run, so rules compare a reward with earlier ones of the run.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from treadle.trainer.report.metrics import (
    ENTROPY,
    FRESH_MISMATCH,
    GRAD_NORM,
    MISMATCH,
    RANK_TIME,
    REWARD,
    REWARD_MAX,
    REWARD_MIN,
    ROLLOUT_S,
    SERVER_TIME,
    SIGNAL,
    STEP_S,
    TRAINED_TOKENS,
    VALIDATE_S,
    Record,
)

__all__ = ["KEPT_STEPS", "RULES", "AlertRule", "History"]

History = Sequence[Record]
"""The last steps of training, at most `KEPT_STEPS` of them, oldest first; never empty."""

KEPT_STEPS: Final = 200
"""Number of steps that "before" means in a rule; it also bounds the cost of a step."""

_WINDOW: Final = 5
"""Steps that are judged together, so that one odd batch raises no alert."""

_EXPLODED: Final = 10.0
"""A gradient norm this many times above the median of the steps before has exploded."""
_MIN_NORMS, _MAX_NORMS = 5, 50

_COLLAPSED: Final = 0.5
"""Share of the way from the least reward seen to the best window that a reward may fall."""
_STANDARD_ERRORS: Final = 4.0
"""Number of standard errors that the fall must exceed. Of 30,000 simulated steps of constant
quality 11 raised an alert, all with 8 rows per step whose samples agreed within each group."""
_SOLVED: Final = 0.9
"""Share of the way from the least to the greatest reward seen; above it there is little to gain."""
_ENTROPY_LEFT: Final = 0.1
"""Share of the earlier entropy. The default run ends with 0.2 of it, and has learned."""

_LITTLE_SIGNAL: Final = 0.1
"""Share of the groups. The default run ends with 0.2, near its best reward."""
_DRIFT: Final = 0.01
"""Share of the turns. The default run has at most 4 in 24,000; a collapsed policy had a third."""
_MISMATCH: Final = 0.1
"""Nats. bfloat16 gives a few hundredths."""
_TAIL: Final = 5.0
"""Times the mean of its trajectories that a rollout may wait for the slowest."""
_TOOLS: Final = 2.0
"""Times the seconds of completions that trajectories may spend in tools."""
_MOSTLY: Final = 0.5
"""Share of a step that its cause explains."""
_TIME_SHARES: Final = (
    *(f"{SERVER_TIME}{cause}" for cause in ("tools", "training", "prompts", "weights")),
    f"{RANK_TIME}rollout",
)
_WITHOUT_SERVERS: Final = 0.8
"""Share of a step in which nothing is sampled."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """One alert; `said` is its text in the summary of a run, before "in 3 of 40 steps".

    Attributes:
        name: In `alerts.jsonl`, in the loggers and as the label of `treadle_alert`.
        check: Returns the text about the last step; None if the alert does not fire.
        reads: The metrics that `check` uses.
        once: Whether it concerns the setup of a run, which lasts: then it is reported once for
            each remedy, which its text names after the first semicolon.
    """

    name: str
    said: str
    check: Callable[[History], str | None]
    reads: tuple[str, ...]
    once: bool = False


def _mean(values: Sequence[float]) -> float:
    """Returns the mean; unlike `statistics.fmean`, infinity where the sum overflows."""
    return sum(values) / len(values)


def _values(history: History, name: str) -> list[float]:
    return [r[name] for r in history if name in r and math.isfinite(r[name])]


def _window(history: History, name: str) -> list[float]:
    """Returns the last values of a metric; none if the last step or some of the window lack it."""
    values = _values(history[-_WINDOW:], name)
    return values if len(values) == _WINDOW else []


def _rewards_seen(history: History) -> tuple[float, float]:
    low, high = _values(history, REWARD_MIN), _values(history, REWARD_MAX)
    return min(low, default=math.nan), max(high, default=math.nan)


def _is_solved(history: History) -> bool:
    low, high = _rewards_seen(history)
    rewards = _window(history, REWARD)
    return bool(rewards) and _mean(rewards) >= low + _SOLVED * (high - low)


def _no_signal(history: History) -> str | None:
    metrics = history[-1]
    if metrics.get(SIGNAL) != 0:
        return None
    low, high = metrics.get(REWARD_MIN), metrics.get(REWARD_MAX)
    if low is not None and low == high:
        rewards = f"every reward is {metrics.get(REWARD, low):g}"
    else:
        rewards = "no group has differing rewards"
    if metrics.get(TRAINED_TOKENS) == 0:
        return f"nothing was trained: {rewards}, so every advantage is 0"
    return f"{rewards}, so every advantage is 0 and the reward moves no weight"


def _little_signal(history: History) -> str | None:
    shares = _window(history, SIGNAL)
    if not shares or shares[-1] == 0 or _mean(shares) >= _LITTLE_SIGNAL:
        return None
    fix = (
        "the rows are solved: end the run, or take harder rows"
        if _is_solved(history)
        else "raise rollout.samples_per_prompt, or take rows that the model solves now and then"
    )
    return (
        f"only {_mean(shares):.0%} of the groups of the last {_WINDOW} steps have "
        f"differing rewards, and only they change the weights; {fix}"
    )


def _reward_collapsed(history: History) -> str | None:
    rewards, rows = _values(history, REWARD), history[-1].get("groups/trained", 0.0)
    low, high = _rewards_seen(history)
    if len(rewards) <= _WINDOW or not _window(history, REWARD) or math.isnan(low) or rows < 1:
        return None
    now = _mean(rewards[-_WINDOW:])
    if max(rewards) - now <= _COLLAPSED * (max(rewards) - low):
        return None  # Nor from any mean: this spares most steps the search.

    def variance(mean: float, steps: int) -> float:
        """Returns the greatest one of a mean over rows whose rewards are from `low` to `high`."""
        return max(0.0, (mean - low) * (high - mean)) / (rows * steps)

    collapsed_from = -math.inf
    for end in range(1, len(rewards) - _WINDOW + 1):
        # The first windows are shorter, as a run may collapse in its first steps.
        before = rewards[max(0, end - _WINDOW) : end]
        mean = _mean(before)
        error = math.sqrt(variance(mean, len(before)) + variance(now, _WINDOW))
        fell = mean - now
        if fell > _COLLAPSED * (mean - low) and fell > _STANDARD_ERRORS * error:
            collapsed_from = max(collapsed_from, mean)
    if collapsed_from == -math.inf:
        return None
    return (
        f"the reward collapsed: its mean of the last {_WINDOW} steps is {now:.3g}, and was "
        f"{collapsed_from:.3g} before; go back to an earlier checkpoint (run.resume) with a lower "
        "policy.optimizer.lr"
    )


def _entropy_collapsed(history: History) -> str | None:
    entropies, now = _values(history, ENTROPY), _window(history, ENTROPY)
    if not now or len(entropies) < 2 * _WINDOW or _is_solved(history):
        return None
    start, end = statistics.median(entropies[:_WINDOW]), _mean(now)
    if start <= 0 or end >= _ENTROPY_LEFT * start:
        return None
    return (
        f"the entropy collapsed: {end:.2g} nats per token, and {start:.2g} at most {KEPT_STEPS} "
        "steps before; the samples of a row are nearly alike, and comparing them teaches little: "
        "lower policy.optimizer.lr, set algorithm.entropy_coef, or raise algorithm.clip_high"
    )


def _drift(history: History) -> str | None:
    # Not `drift/observed`: many templates leave the reasoning of earlier turns out, in every turn.
    last = history[-_WINDOW:]
    turns, sampled = sum(_values(last, "drift/turns")), sum(_values(last, "drift/sampled"))
    if "drift/turns" not in history[-1] or sampled <= _DRIFT * turns:
        return None
    return (
        f"{sampled:.0f} of {turns:.0f} turns in the last {len(last)} steps have sampled ids that "
        "the chat template would not write for their text; the first finding of the kind drift "
        "shows where"
    )


def _mismatch(history: History) -> str | None:
    metrics = history[-1]
    mean = metrics.get(f"{FRESH_MISMATCH}_mean", metrics.get(f"{MISMATCH}_mean", math.nan))
    if not mean > _MISMATCH:
        return None
    return (
        f"servers and policy disagree: the log-probabilities of a token are {mean:.2g} nats apart "
        "on average; compare with rollout.dtype=float32 and policy.dtype=float32"
    )


def _idle(history: History) -> str | None:
    shares = {
        name: _mean(values)
        for name in _TIME_SHARES
        if (values := _window(history, name)) and _window(history, STEP_S)
    }
    return _idle_by_shares(shares) if len(shares) == len(_TIME_SHARES) else _idle_by_times(history)


def _idle_by_shares(shares: Record) -> str | None:
    """Returns what the servers waited for, if that was most of their time."""
    tools, training = shares[f"{SERVER_TIME}tools"], shares[f"{SERVER_TIME}training"]
    prompts = shares[f"{SERVER_TIME}prompts"]
    idle = training + prompts
    weights, batch = shares[f"{SERVER_TIME}weights"], shares[f"{RANK_TIME}rollout"]
    if tools > _MOSTLY:
        return (
            f"servers idle: for {tools:.0%} of the step all of their trajectories were in tools; "
            "sample more trajectories at a time (rollout.max_in_flight, data.prompts_per_step), or "
            "make the tools faster"
        )
    if weights > _MOSTLY:
        return (
            f"servers idle: for {weights:.0%} of the step they were stopped for new weights; "
            "interrupt completions instead of waiting for them (sync.in_flight=interrupt), or give "
            "the weights a faster way (sync.transport)"
        )
    if tools + idle > _MOSTLY and batch > _MOSTLY:
        return (
            f"servers idle: for {tools + idle:.0%} of the step they waited for the last "
            f"trajectories of the batch, and the policy did for {batch:.0%}; let trajectories "
            "continue beside training (schedule.kind=stream or async), or lower "
            "rollout.response_length or agent.deadline_s"
        )
    if idle > _WITHOUT_SERVERS and training >= prompts:
        return (
            f"servers idle: for {training:.0%} of the step they had no trajectory while the policy "
            "trained; sample beside training (schedule.kind=async, schedule.max_staleness), "
            "give the policy more devices, or share the servers' (rollout.release_memory)"
        )
    if idle > _WITHOUT_SERVERS:
        return (
            f"servers idle: for {prompts:.0%} of the step no prompt was there and the policy did "
            "not train; see which other phase takes the time (time/*_s): save less often "
            "(schedule.save_every), or begin more rows at a time (data.prompts_per_step)"
        )
    return None


def _idle_by_times(history: History) -> str | None:
    """Checks the same for a run whose servers do not report their time by cause."""
    names = ("agent_loop/generate_s", "agent_loop/tool_calls_s")
    generate, tools, slow_generate, slow_tools, rollout, step, validate, release = (
        _mean([record.get(name, 0.0) for record in history[-_WINDOW:]])
        for name in (
            *names,
            "agent_loop/slowest/generate_s",
            "agent_loop/slowest/tool_calls_s",
            ROLLOUT_S,
            STEP_S,
            VALIDATE_S,
            "time/release_s",
        )
    )
    if not _window(history, STEP_S) or not _window(history, ROLLOUT_S):
        return None
    slowest, timed = slow_generate + slow_tools, bool(_window(history, names[0]))
    if timed and slowest > _TAIL * (generate + tools) and slowest > rollout / 2:
        return (
            f"servers idle: a rollout waits {slowest:.3g} s for its slowest trajectory, the mean "
            f"is {generate + tools:.3g} s; lower rollout.response_length or agent.deadline_s"
        )
    if timed and tools > _TOOLS * generate and rollout > step / 2:
        return (
            f"servers idle: a trajectory spends {tools:.3g} s in tools and {generate:.3g} s in "
            "completions; sample more trajectories at a time (data.prompts_per_step, "
            "rollout.max_in_flight), or make the tools faster"
        )
    # Servers that share devices with the policy cannot work meanwhile.
    if not release and 1 - (rollout + validate) / step > _WITHOUT_SERVERS:
        return (
            f"servers idle: they sample in {rollout + validate:.3g} s of a step of {step:.3g} s; "
            "give the policy more devices, or share the servers' (rollout.release_memory)"
        )
    return None


def _failed(history: History) -> str | None:
    failed = history[-1].get("rollout/num_failed", 0.0)
    total = history[-1].get("rollout/num_trajectories", 0.0)
    return f"most trajectories failed: {failed:.0f} of {total:.0f}" if failed > total / 2 else None


def _not_finite(history: History) -> str | None:
    if math.isfinite(history[-1].get(GRAD_NORM, 0.0)):
        return None
    return "the gradient is not finite: lower policy.optimizer.lr"


def _exploded(history: History) -> str | None:
    norm = history[-1].get(GRAD_NORM, math.nan)
    # A step without signal has no gradient.
    norms = [value for value in _values(history[:-1], GRAD_NORM) if value > 0][-_MAX_NORMS:]
    if not math.isfinite(norm) or len(norms) < _MIN_NORMS:
        return None
    median = statistics.median(norms)
    if norm <= _EXPLODED * median:
        return None
    return (
        f"the gradient exploded: its norm is {norm:.3g}, and the median of the {len(norms)} steps "
        f"before is {median:.3g}; lower policy.optimizer.lr"
    )


_REWARDS: Final = (REWARD, REWARD_MIN, REWARD_MAX)

RULES: Final = (
    AlertRule(
        "no_signal",
        "no group had differing rewards",
        _no_signal,
        (SIGNAL, TRAINED_TOKENS, *_REWARDS),
    ),
    AlertRule(
        "little_signal", "few groups had differing rewards", _little_signal, (SIGNAL, *_REWARDS)
    ),
    AlertRule(
        "reward_collapsed",
        "the reward had collapsed",
        _reward_collapsed,
        ("groups/trained", *_REWARDS),
    ),
    AlertRule(
        "entropy_collapsed", "the entropy had collapsed", _entropy_collapsed, (ENTROPY, *_REWARDS)
    ),
    AlertRule(
        "drift",
        "token ids drifted from their text",
        _drift,
        ("drift/turns", "drift/sampled"),
    ),
    AlertRule(
        "mismatch",
        "servers and policy disagreed",
        _mismatch,
        (f"{FRESH_MISMATCH}_mean", f"{MISMATCH}_mean"),
    ),
    AlertRule(
        "idle",
        "servers were idle",
        _idle,
        (
            "agent_loop/generate_s",
            "agent_loop/tool_calls_s",
            "agent_loop/slowest/generate_s",
            "agent_loop/slowest/tool_calls_s",
            "time/release_s",
            ROLLOUT_S,
            STEP_S,
            VALIDATE_S,
            *_TIME_SHARES,
        ),
        once=True,
    ),
    AlertRule(
        "failed",
        "most trajectories failed",
        _failed,
        ("rollout/num_failed", "rollout/num_trajectories"),
    ),
    AlertRule("not_finite", "the gradient was not finite", _not_finite, (GRAD_NORM,)),
    AlertRule("exploded", "the gradient exploded", _exploded, (GRAD_NORM,)),
)
"""All alerts, in the order in which they are reported."""
