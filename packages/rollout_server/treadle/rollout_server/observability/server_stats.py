"""Statistics of the completions and updates of one server, as plain numbers.

Invariant: numbers only grow. The event loop writes them, at most once per message, and
`metrics.py` reads them from another thread, which may see a completion counted in part until the
next scrape. Nothing here waits or uses Prometheus.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from treadle.rollout_server.scheduling.lifecycle import Lifecycle, ServerState
from treadle.rollout_server.updates.weight_update import CurrentUpdate, UpdateState, WeightUpdate

# Seconds: from an empty queue to a completion of many thousand tokens.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Distribution:
    """A histogram: the number of values per bucket.

    Args:
        bounds: Inclusive upper bounds in ascending order; one more bucket is above the last.
    """

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Counts per bound, then the count above the last bound."""
        return tuple(self._counts)


class ServerStats:
    """Counts since the server started.

    Attributes:
        completions: Calls of Generate that ended, by outcome: `stop`, `length`, `interrupted`,
            `cancelled` (by the caller, or its deadline), `bug`, or the reason of the error in
            lower case.
        sampled_tokens: Number of tokens sent to clients.
        prompt_tokens: Number of prompt tokens of completions that started.
        cached_prompt_tokens: Number of those that were in the engine's prefix cache.
        queue_s: Seconds from a call to the start of its sequence, for sequences that started.
        engine_s: Seconds from the start of a sequence to its end.
        updates: Weight updates that ended, by outcome: `committed`, `aborted`, `expired`, `failed`.
        update_bytes: Bytes of the tensors of committed updates, in the engine's element types.
        switch_s: Seconds for which new weights paused generation, per update.
    """

    def __init__(self) -> None:
        self.completions: Counter[str] = Counter()
        self.sampled_tokens = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.queue_s = Distribution()
        self.engine_s = Distribution()
        self.updates: Counter[str] = Counter()
        self.update_bytes = 0
        self.switch_s = Distribution()

    def count_updates(self, current: CurrentUpdate) -> None:
        """Starts to count the updates that end in `current`."""

        def ended(update: WeightUpdate) -> None:
            self.updates[update.state.name.lower()] += 1
            if update.state is UpdateState.COMMITTED:
                self.update_bytes += sum(tensor.size_bytes for tensor in update.begin.tensors)

        current.observe(ended)

    def time_switches(self, lifecycle: Lifecycle, now: Callable[[], float]) -> None:
        """Starts to measure how long the server is UPDATING each time."""
        began: float | None = None

        def changed(state: ServerState) -> None:
            nonlocal began
            if state is ServerState.UPDATING:
                began = now()
            elif began is not None:
                self.switch_s.add(now() - began)
                began = None

        lifecycle.observe(changed)
