"""Which trajectories are traced: some of each step, within a budget, and every one that failed.

Invariant: a trace reaches the sink as a whole or not at all, and each one that does not is counted.
The spans of a trace are held back until its root has closed and shows whether it failed. A trace
that is not a trajectory's (an update of the policy) is always traced.

Nobody waits: `record` is called where a span closes, and passes the trace on or forgets it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from treadle.tracing.finished import FinishedSpan
from treadle.tracing.sampling import TraceSampler
from treadle.tracing.sink import TraceSink, record_safely
from treadle.tracing.whole_traces import WholeTraces

_log = logging.getLogger(__name__)


class TraceFilter:
    """Passes wanted traces on to `sink`. Does not own it; call `close` before closing it.

    Args:
        sink: Receives the spans of the traces that are wanted.
        sampler: Chooses the samples of a step; all trajectories of one are traced together.
        max_samples: Maximum number of samples per step whose trajectories are traced. None: all
            that the sampler chooses.
        max_bytes: When this much is written, only failed trajectories are traced. None: no limit.
        bytes_written: Returns how much is written; need not be up to date.
    """

    def __init__(
        self,
        sink: TraceSink,
        sampler: TraceSampler,
        *,
        max_samples: int | None,
        max_bytes: int | None,
        bytes_written: Callable[[], int],
    ) -> None:
        self._sink = sink
        self._sampler = sampler
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._bytes_written = bytes_written
        self._lock = threading.Lock()
        self._traces = WholeTraces()
        self._chosen: dict[tuple[int, bool], frozenset[int]] = {}
        self._over_budget = False
        self._num_traced = self._num_not_chosen = self._num_over_budget = 0

    @property
    def recording(self) -> bool:
        """As the sink's."""
        return self._sink.recording

    def expect(self, step: int, sample_indices: Iterable[int], *, validate: bool) -> None:
        """Chooses among the samples of a step before they are sampled.

        Samples that come later in the same step are chosen only if fewer than `max_samples` were.
        """
        with self._lock:
            key = (step, validate)
            before = self._chosen.get(key, frozenset())
            left = None if self._max_samples is None else self._max_samples - len(before)
            self._chosen = {key: before | self._sampler.choose(step, sample_indices, at_most=left)}

    def record(self, span: FinishedSpan) -> None:
        """Holds `span` back, or passes on its trace if that is complete and wanted."""
        with self._lock:
            wanted = [t for t in self._traces.add(span) if self._wants(t)]
        self._pass_on(wanted)

    def close(self) -> None:
        """Passes on the traces that are still open, and logs how many were left out."""
        with self._lock:
            rest = list(self._traces.rest())
        self._pass_on(rest)
        _log.log(
            logging.WARNING if self._over_budget else logging.INFO,
            "traces: %d trajectories are traced, %d were not chosen, "
            "%d were left out for the budget",
            self._num_traced,
            self._num_not_chosen,
            self._num_over_budget,
        )

    def _pass_on(self, traces: Sequence[Sequence[FinishedSpan]]) -> None:
        for trace in traces:
            for span in trace:
                record_safely(self._sink, span)

    def _wants(self, trace: Sequence[FinishedSpan]) -> bool:
        root = trace[-1]
        index, step = root.attributes.get("sample_index"), root.attributes.get("step")
        if not isinstance(index, int) or not isinstance(step, int):
            return True
        failed = root.error is not None or root.attributes.get("stop") == "error"
        if not failed and not self._chose(step, index, root.attributes.get("validate") is True):
            self._num_not_chosen += 1
            return False
        if not failed and self._is_over_budget(step):
            self._num_over_budget += 1
            return False
        self._num_traced += 1
        return True

    def _chose(self, step: int, index: int, validate: bool) -> bool:
        chosen = self._chosen.get((step, validate))
        return self._sampler.wants(step, index) if chosen is None else index in chosen

    def _is_over_budget(self, step: int) -> bool:
        if self._max_bytes is None or self._over_budget:
            return self._over_budget
        if self._bytes_written() >= self._max_bytes:
            self._over_budget = True
            _log.warning(
                "%d bytes of traces are written at step %d, the budget: from now on only failed "
                "trajectories are traced",
                self._max_bytes,
                step,
            )
        return self._over_budget
