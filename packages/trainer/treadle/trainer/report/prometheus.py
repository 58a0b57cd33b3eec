"""The metrics of a run for Prometheus: `GET /metrics`, served while the run trains.

Invariant: the run writes what it knows into `RunMetrics`, and waits for nobody; a scrape copies it
under the lock, on a thread of the endpoint. Names are those of docs/metrics.md in Prometheus'
characters, with the unit at the end: `time/rollout_s` is `treadle_step_time_rollout_seconds`. The
label `metric` has the name as Treadle writes it, so that two names which differ in other characters
only stay apart.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from treadle.agent_loop import SetupError
from treadle.trainer.report.alert_rules import RULES
from treadle.trainer.report.metrics import SAMPLED_TOKENS, TRAINED_TOKENS, Record

if TYPE_CHECKING:
    from treadle.trainer.config.schema import AnyRunConfig

__all__ = ["RunMetrics", "prometheus_name", "serve_run_metrics"]

_PHASES: Final = (
    *("start", "rollout", "greedy", "release", "kl", "values", "critic", "train", "sync"),
    *("validate", "save"),
)
"""Each is a sample from the first scrape on, so that its time can be summed."""
_TRAJECTORIES: Final[Mapping[str, str]] = {"train": "rollout", "val": "val"}
"""Label to the beginning of the metrics that count them."""
_TOKENS: Final[Mapping[str, str]] = {"sampled": SAMPLED_TOKENS, "trained": TRAINED_TOKENS}


def prometheus_name(metric: str) -> str:
    """Returns the name of a step's metric in Prometheus."""
    name = re.sub(r"_s$", "_seconds", metric.replace("@", "_at_"))
    return "treadle_step_" + re.sub("[^a-zA-Z0-9_]", "_", name)


class RunMetrics(Collector):
    """The latest metrics, the phase and the alerts of a run, for Prometheus."""

    def __init__(self, *, project: str, name: str, clock: Callable[[], float] = time.time) -> None:
        self._run = {"project": project, "run": name}
        self._clock = clock
        self._lock = threading.Lock()
        self._step = 0
        self._ended_at = math.nan
        self._values: dict[str, float] = {}
        self._phase: str | None = None
        self._pending = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._alerts: Set[str] = frozenset()

    def begin_phase(self, name: str, *, total: int) -> None:
        """Takes the phase that begins, and how many trajectories it is going to give."""
        with self._lock:
            self._phase, self._pending = name, total

    def end_phase(self) -> None:
        """Takes that no phase runs."""
        with self._lock:
            self._phase, self._pending = None, 0

    def advance(self, count: int) -> None:
        """Takes that some trajectories of the phase have ended."""
        with self._lock:
            self._pending -= count

    def step_done(self, step: int, values: Record) -> None:
        """Takes the metrics of a step; one that it lacks keeps the value of the step before."""
        with self._lock:
            self._step, self._ended_at = step, self._clock()
            self._values |= values
            for phase, start in _TRAJECTORIES.items():
                failed = values.get(f"{start}/num_failed", 0.0)
                self._counts["failed", phase] += round(failed)
                ended = values.get(f"{start}/num_trajectories", 0.0) - failed
                self._counts["ended", phase] += round(ended)
            for kind, name in _TOKENS.items():
                self._counts["tokens", kind] += round(values.get(name, 0.0))

    def set_alerts(self, names: Set[str]) -> None:
        """Takes which alerts fire in the last step."""
        with self._lock:
            self._alerts = frozenset(names)

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics; docs/operations.md describes them."""
        with self._lock:
            return [*self._progress(), *self._totals(), self._fired(), *_of_step(self._values)]

    def _progress(self) -> Iterator[Metric]:
        yield InfoMetricFamily("treadle_trainer", "The run.", value=self._run)
        yield GaugeMetricFamily("treadle_trainer_step", "The last that ended.", value=self._step)
        yield GaugeMetricFamily(
            "treadle_trainer_last_step_timestamp_seconds",
            "When it ended, since the epoch; NaN before the first.",
            value=self._ended_at,
        )
        phases = GaugeMetricFamily(
            "treadle_trainer_phase", "1 for the phase that runs.", labels=("phase",)
        )
        for name in dict.fromkeys((*_PHASES, self._phase)):
            if name is not None:
                phases.add_metric((name,), float(name == self._phase))
        yield phases
        yield GaugeMetricFamily(
            "treadle_trainer_trajectories_pending",
            "Of the phase that runs, those that have not ended.",
            value=max(0, self._pending),
        )

    def _totals(self) -> Iterator[Metric]:
        trajectories = CounterMetricFamily(
            "treadle_trainer_trajectories",
            "Since this process began, by outcome.",
            labels=("phase", "outcome"),
        )
        for phase in _TRAJECTORIES:
            for outcome in ("ended", "failed"):
                trajectories.add_metric((phase, outcome), self._counts[outcome, phase])
        yield trajectories
        for kind in _TOKENS:
            yield CounterMetricFamily(
                f"treadle_trainer_{kind}_tokens",
                "In training, since this process began.",
                value=self._counts["tokens", kind],
            )

    def _fired(self) -> Metric:
        family = GaugeMetricFamily(
            "treadle_alert", "1 if it fires in the last step.", labels=("name",)
        )
        for rule in RULES:
            family.add_metric((rule.name,), float(rule.name in self._alerts))
        return family


def _of_step(values: Record) -> Iterable[Metric]:
    families: dict[str, GaugeMetricFamily] = {}
    for metric, value in values.items():
        name = prometheus_name(metric)
        if name not in families:
            text = f"{metric} of the last step that had it."
            families[name] = GaugeMetricFamily(name, text, labels=("metric",))
        families[name].add_metric((metric,), value)
    return families.values()


@contextmanager
def serve_run_metrics(run: AnyRunConfig) -> Iterator[tuple[RunMetrics, str | None]]:
    """Serves the metrics of a run in this block, if `run.metrics_port` is set.

    Yields:
        The metrics, and the address as http://HOST:PORT/metrics with the actual port; None where
        nothing is served.

    Raises:
        SetupError: The endpoint cannot listen.
    """
    metrics = RunMetrics(project=run.project, name=run.name)
    if run.metrics_port is None:
        yield metrics, None
        return
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(run.metrics_port, run.metrics_host, registry)
    except OSError as error:
        raise SetupError(
            f"cannot listen on run.metrics_host={run.metrics_host}, "
            f"run.metrics_port={run.metrics_port}: {error.strerror or error}; choose another "
            "port, 0 picks a free one"
        ) from error
    try:
        host = f"[{run.metrics_host}]" if ":" in run.metrics_host else run.metrics_host
        yield metrics, f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
