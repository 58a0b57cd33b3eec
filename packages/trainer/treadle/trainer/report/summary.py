"""The summary of a run: its results and where its time went, computed from its metrics alone.

Invariant: a number that the metrics lack is None and shown as a dash, never as zero. All functions
are pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.trainer.report.metrics import (
    FRESH_MISMATCH,
    KL,
    MFU,
    MISMATCH,
    RANK_RATE,
    RANK_TIME,
    REWARD,
    ROLLOUT_S,
    SAMPLED_TOKENS,
    SERVER_TIME,
    SERVERS_LOST,
    SERVERS_RESTARTED,
    STALE_TOKENS,
    STALENESS,
    STEP,
    STEP_S,
    TOOL_RATE,
    TRAIN_LOSS,
    TRAIN_S,
    TRAINED_TOKENS,
    VAL_ACCURACY,
    VAL_LOSS,
    VAL_REWARD,
    VAL_TOOL_RATE,
    Record,
)
from treadle.trainer.report.warning_signs import run_signs

_WINDOW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A number at the start and at the end of a run; None where it was not measured."""

    start: float | None
    end: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far the servers' log-probabilities were from the policy's, in nats.

    Attributes:
        kl: Mean of the steps' estimates of KL(servers || policy).
        stale: Share of the tokens, 0 to 1, in which older weights had a part; the others alone
            are in mean, p99 and max.
    """

    mean: float
    p99: float
    max: float
    kl: float
    stale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a run.

    Attributes:
        num_steps: Training steps in the metrics.
        window: Steps that the start and end of `reward` and `tool_rate` are the mean of.
        reward: Mean reward of the training trajectories.
        tool_rate: Share of the training trajectories, 0 to 1, that called a tool.
        val_accuracy: Share of right answers, 0 to 1, likewise; None where a validation has none.
        val_tool_rate: Share of the validation trajectories that called a tool, likewise.
        train_loss: Loss of supervised fine-tuning, in nats per token; the mean of `window` steps.
        val_loss: The same of the first and the last validation.
        servers_lost: Rollout servers that died or failed.
        servers_restarted: Number of them that were started again.
        rollout_tokens_per_s: Sampled tokens over the seconds of the rollout phases.
        train_tokens_per_s: Trained tokens over the seconds of the training phases.
        rank_tokens_per_s: Tokens of optimizer steps over their seconds and the number of ranks; the
            median of the steps.
        mfu: Model FLOPs utilisation, 0 to 1, likewise; None where the peak is not known.
        total_s: Seconds of all steps and of the validation before them.
        signs: Warning signs, one line each; see `warning_signs`.
        phases_s: Phase to seconds, the longest first; "other" is what no phase accounts for.
        servers: Cause to share of the servers' time, the greatest first; empty without steps that
            have it.
        ranks: The same of the policy ranks.
    """

    num_steps: int
    window: int
    reward: Change
    tool_rate: Change
    val_reward: Change
    val_accuracy: Change
    val_tool_rate: Change
    train_loss: Change
    val_loss: Change
    mismatch: Mismatch | None
    servers_lost: int
    servers_restarted: int
    rollout_tokens_per_s: float | None
    train_tokens_per_s: float | None
    rank_tokens_per_s: float | None
    mfu: float | None
    total_s: float
    signs: tuple[str, ...]
    phases_s: Mapping[str, float]
    servers: Mapping[str, float]
    ranks: Mapping[str, float]


def summarize(records: Sequence[Record]) -> Summary:
    """Sums up the lines of a metrics log, in their order."""
    steps = [record for record in records if record[STEP] > 0]
    window = max(1, min(_WINDOW, len(steps) // 2))
    # A reward that is not always 0 or 1 can be so in one validation by chance.
    has_accuracy = all(VAL_ACCURACY in record for record in records if VAL_REWARD in record)
    return Summary(
        num_steps=len(steps),
        window=window,
        reward=_means(steps, REWARD, window),
        tool_rate=_means(steps, TOOL_RATE, window),
        val_reward=_means(records, VAL_REWARD, 1),
        val_accuracy=_means(records if has_accuracy else (), VAL_ACCURACY, 1),
        val_tool_rate=_means(records, VAL_TOOL_RATE, 1),
        train_loss=_means(steps, TRAIN_LOSS, window),
        val_loss=_means(records, VAL_LOSS, 1),
        mismatch=_mismatch(steps),
        servers_lost=round(sum(_values(records, SERVERS_LOST))),
        servers_restarted=round(sum(_values(records, SERVERS_RESTARTED))),
        rollout_tokens_per_s=_rate(
            steps, SAMPLED_TOKENS, STEP_S if _values(steps, STALENESS) else ROLLOUT_S
        ),
        train_tokens_per_s=_rate(steps, TRAINED_TOKENS, TRAIN_S),
        rank_tokens_per_s=_median(steps, RANK_RATE),
        mfu=_median(steps, MFU),
        total_s=sum(map(_duration, records)),
        signs=run_signs(records),
        phases_s=_phases(records),
        servers=_time_shares(steps, SERVER_TIME),
        ranks=_time_shares(steps, RANK_TIME),
    )


def final_numbers(records: Sequence[Record]) -> dict[str, float]:
    """Returns the numbers of the summary that stand for the whole run; none of an empty log."""
    if not records:
        return {}
    summary = summarize(records)
    numbers = {
        "reward": summary.reward.end,
        "val_reward": summary.val_reward.end,
        "val_accuracy": summary.val_accuracy.end,
        "train_loss": summary.train_loss.end,
        "val_loss": summary.val_loss.end,
        "num_steps": summary.num_steps,
        "total_s": summary.total_s,
    }
    return {name: value for name, value in numbers.items() if value is not None}


def summary_rows(summary: Summary, run_dir: Path) -> tuple[tuple[str, str, str], ...]:
    """Returns rows of (what, at the start, at the end); a single number leaves the second ""."""
    is_sft = summary.train_loss.end is not None
    per_step = f"mean of {summary.window} step{'s' if summary.window > 1 else ''}"
    phases = {
        name: seconds / summary.total_s
        for name, seconds in summary.phases_s.items()
        if summary.total_s
    }
    time_and_place = (
        *(("look at this", "", sign) for sign in summary.signs),
        *(() if is_sft else (("rollout", "", _per_second(summary.rollout_tokens_per_s)),)),
        ("training", "", _per_second(summary.train_tokens_per_s)),
        *((("updates, per rank", "", _usage(summary)),) if summary.rank_tokens_per_s else ()),
        ("time", "", f"{format_seconds(summary.total_s)} for {summary.num_steps} steps"),
        ("where it went", "", _in_percent(phases) or "-"),
        *(
            (what, "", _in_percent(shares))
            for what, shares in (("of servers", summary.servers), ("of policy", summary.ranks))
            if shares
        ),
        ("run directory", "", str(run_dir)),
    )
    if is_sft:
        losses = (("loss", per_step, summary.train_loss), ("held-out loss", "", summary.val_loss))
        return (
            ("nats per token", "start", "end"),
            *(
                (f"{what} ({of})" if of else what, _number(loss.start), _number(loss.end))
                for what, of, loss in losses
            ),
            *time_and_place,
        )
    start, end = summary.val_accuracy.start, summary.val_accuracy.end
    accuracy = () if end is None else (("held-out accuracy", _share(start), _share(end)),)
    return (
        ("", "start", "end"),
        (f"reward ({per_step})", _number(summary.reward.start), _number(summary.reward.end)),
        (
            f"tool-call rate ({per_step})",
            _share(summary.tool_rate.start),
            _share(summary.tool_rate.end),
        ),
        ("held-out reward", _number(summary.val_reward.start), _number(summary.val_reward.end)),
        *accuracy,
        (
            "held-out tool-call rate",
            _share(summary.val_tool_rate.start),
            _share(summary.val_tool_rate.end),
        ),
        ("servers and policy", "", _apart(summary.mismatch)),
        ("rollout servers", "", _lost(summary)),
        *time_and_place,
    )


def format_seconds(seconds: float) -> str:
    """9.4 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def phase_of(name: str) -> str | None:
    """Returns the phase whose seconds are the metric `name`, or None if it is another metric."""
    if name == STEP_S or not (name.startswith("time/") and name.endswith("_s")):
        return None
    return name.removeprefix("time/").removesuffix("_s")


def phase_seconds(record: Record) -> dict[str, float]:
    """Returns the seconds of each phase of one step."""
    return {
        phase: value
        for name, value in record.items()
        if (phase := phase_of(name)) is not None and math.isfinite(value)
    }


def _duration(record: Record) -> float:
    """Seconds of one step; the validation before training has phases and no duration."""
    total = record.get(STEP_S, math.nan)
    return total if math.isfinite(total) else sum(phase_seconds(record).values())


def _phases(records: Sequence[Record]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for record in records:
        for phase, value in phase_seconds(record).items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    other = sum(map(_duration, records)) - sum(seconds.values())
    # Below a millisecond it is the rounding of the sum.
    if other > 1e-3:
        seconds["other"] = other
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _time_shares(steps: Sequence[Record], prefix: str) -> dict[str, float]:
    """Returns the shares of the time of all steps that have them."""
    seconds: dict[str, float] = {}
    for step in steps:
        for name, share in step.items():
            if name.startswith(prefix):
                cause = name.removeprefix(prefix)
                seconds[cause] = seconds.get(cause, 0.0) + share * _duration(step)
    total_s = sum(seconds.values())
    shares = {cause: value / total_s for cause, value in seconds.items() if total_s > 0}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _in_percent(shares: Mapping[str, float]) -> str:
    """Returns the shares that are not 0% when rounded."""
    return " · ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def _values(records: Sequence[Record], name: str) -> list[float]:
    return [r[name] for r in records if name in r and math.isfinite(r[name])]


def _means(records: Sequence[Record], name: str, window: int) -> Change:
    values = _values(records, name)
    if not values:
        return Change(start=None, end=None)
    first, last = values[:window], values[-window:]
    return Change(start=sum(first) / len(first), end=sum(last) / len(last))


def _median(records: Sequence[Record], name: str) -> float | None:
    values = _values(records, name)
    return statistics.median(values) if values else None


def _usage(summary: Summary) -> str:
    mfu = "" if summary.mfu is None else f", {summary.mfu:.1%} MFU"
    return _per_second(summary.rank_tokens_per_s) + mfu


def _rate(records: Sequence[Record], tokens: str, seconds: str) -> float | None:
    total_s = sum(_values(records, seconds))
    counts = _values(records, tokens)
    return sum(counts) / total_s if counts and total_s > 0 else None


def _mismatch(steps: Sequence[Record]) -> Mismatch | None:
    measured = [step for step in steps if math.isfinite(step.get(f"{MISMATCH}_max", math.nan))]
    if not measured:
        return None

    def of(step: Record, what: str) -> float:
        return step.get(f"{FRESH_MISMATCH}_{what}", step[f"{MISMATCH}_{what}"])

    return Mismatch(
        mean=sum(of(step, "mean") for step in measured) / len(measured),
        p99=max(of(step, "p99") for step in measured),
        max=max(of(step, "max") for step in measured),
        kl=sum(step[KL] for step in measured) / len(measured),
        stale=sum(step.get(STALE_TOKENS, 0.0) for step in measured) / len(measured),
    )


def _apart(mismatch: Mismatch | None) -> str:
    if mismatch is None:
        return "-"
    stale = f" without the {mismatch.stale:.1%} of older weights" if mismatch.stale else ""
    return (
        f"log-probabilities {mismatch.mean:.1e} nats apart, p99 {mismatch.p99:.1e}, "
        f"max {mismatch.max:.1e}{stale}; KL {mismatch.kl:.1e}"
    )


def _lost(summary: Summary) -> str:
    if not summary.servers_lost:
        return "none lost"
    return f"{summary.servers_lost} lost, {summary.servers_restarted} started again"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _per_second(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tokens/s"
