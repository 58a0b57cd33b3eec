"""Warning signs: what a run's metrics say about a run that does not learn.

A sign is told in the first step that shows it, and again after 10, 100, ... steps in a row. All
functions are pure but `Watch.step`, which keeps the metrics that it needs.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from treadle.trainer.report.metrics import REWARD, SIGNAL, STEP, TRAINED_TOKENS, Record

__all__ = ["Watch", "run_signs"]

_EXPLODED = 10.0
"""A gradient norm this many times above the median of the steps before has exploded."""
_MIN_NORMS, _MAX_NORMS = 5, 50


class Watch:
    """Tells the warning signs of one step after another."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_MAX_NORMS)
        self._in_a_row: Counter[str] = Counter()

    def step(self, metrics: Record) -> list[str]:
        """Returns what is to be said about a training step."""
        signs = dict(self.signs(metrics))
        for kind in [kind for kind in self._in_a_row if kind not in signs]:
            del self._in_a_row[kind]
        said = []
        for kind, text in signs.items():
            self._in_a_row[kind] += 1
            steps = self._in_a_row[kind]
            if math.log10(steps).is_integer():
                said.append(text if steps == 1 else f"{text} (for {steps} steps in a row)")
        return said

    def signs(self, metrics: Record) -> Iterator[tuple[str, str]]:
        """Yields (kind, text) for each sign of a training step, and remembers its gradient norm."""
        if metrics.get(SIGNAL) == 0:
            yield "no signal", _no_signal(metrics)
        failed = metrics.get("rollout/num_failed", 0.0)
        total = metrics.get("rollout/num_trajectories", 0.0)
        if failed > total / 2:
            yield "failed", f"most trajectories failed: {failed:.0f} of {total:.0f}"
        norm = metrics.get("actor/grad_norm")
        if norm is None:
            return
        if not math.isfinite(norm):
            yield "not finite", "the gradient is not finite: lower policy.optimizer.lr"
            return
        if len(self._norms) >= _MIN_NORMS:
            median = statistics.median(self._norms)
            if median > 0 and norm > _EXPLODED * median:
                yield (
                    "exploded",
                    f"the gradient exploded: its norm is {norm:.3g}, and the median of the "
                    f"{len(self._norms)} steps before is {median:.3g}; lower policy.optimizer.lr",
                )
        if norm > 0:  # a step without signal has none
            self._norms.append(norm)


def run_signs(records: Sequence[Record]) -> tuple[str, ...]:
    """Returns the warning signs of a whole run, one line each, for its summary."""
    steps = [record for record in records if record[STEP] > 0]
    watch = Watch()
    kinds = Counter(kind for step in steps for kind, _ in watch.signs(step))
    untrained = sum(step.get(TRAINED_TOKENS) == 0 for step in steps)
    failed, total = _sum(steps, "rollout/num_failed"), _sum(steps, "rollout/num_trajectories")
    unknown, skipped = _sum(steps, "tool/unknown"), _sum(steps, "actor/skipped_updates")
    held_out = _sum(records, "val/num_failed")
    of = f"of {len(steps)} steps"
    bad = kinds["exploded"] + kinds["not finite"]
    lines = {
        f"nothing was trained in {untrained} {of}": untrained,
        f"no group had differing rewards in {kinds['no signal']} {of}": kinds["no signal"],
        f"{failed:.0f} of {total:.0f} trajectories failed ({failed / (total or 1):.0%})": failed,
        f"{held_out:.0f} trajectories of validations failed": held_out,
        f"the model called unknown tools {unknown:.0f} times": unknown,
        f"the gradient exploded or was not finite in {bad} {of}": bad,
        f"{skipped:.0f} updates were skipped": skipped,
    }
    return tuple(line for line, count in lines.items() if count)


def _no_signal(metrics: Record) -> str:
    low, high = metrics.get("reward/min"), metrics.get("reward/max")
    if low is not None and low == high:
        rewards = f"every reward is {metrics.get(REWARD, low):g}"
    else:
        rewards = "no group has differing rewards"
    if metrics.get(TRAINED_TOKENS) == 0:
        return f"nothing was trained: {rewards}, so every advantage is 0"
    return f"{rewards}, so every advantage is 0 and the reward moves no weight"


def _sum(records: Sequence[Record], name: str) -> float:
    return sum(r[name] for r in records if name in r and math.isfinite(r[name]))
