"""The statistics: what became of the completions and updates of one server, in plain numbers.

Invariant: numbers only grow. They are written on the event loop, once per message or less, and
read by `metrics.py` from another thread, which may see a completion half counted: a scrape
later it is whole. Nothing here waits, and nothing here knows Prometheus.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from treadle.rollout_server.scheduling.lifecycle import Lifecycle, ServerState
from treadle.rollout_server.updates.weight_update import CurrentUpdate, UpdateState, WeightUpdate

# Seconds: from a queue that is empty to a completion of many thousand tokens.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Distribution:
    """How often a number fell between which bounds.

    Args:
        bounds: Upper ends, each included, rising; above the last there is room for the rest.
    """

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts one number."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def counts(self) -> tuple[int, ...]:
        """One for each bound, and one for what is above the last."""
        return tuple(self._counts)


class ServerStats:
    """Counts since the server started.

    Attributes:
        completions: Calls of Generate that ended, by outcome: `stop`, `length`, `interrupted`,
            `cancelled` (by the caller, or its deadline), `bug`, or the reason of the error in
            small letters.
        sampled_tokens: Sent to clients.
        prompt_tokens: Of completions that started.
        cached_prompt_tokens: Of these, found in the engine's prefix cache.
        queue_s: From a call until its sequence has started; of those that started.
        engine_s: From there until its end.
        updates: Weight updates that ended, by outcome: `committed`, `aborted`, `expired`, `failed`.
        update_bytes: Of the tensors of committed updates, as the engine holds them.
        switch_s: How long generation was held up for new weights.
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
        """Counts, from now on, the updates that end in `slot`."""

        def ended(update: WeightUpdate) -> None:
            self.updates[update.state.name.lower()] += 1
            if update.state is UpdateState.COMMITTED:
                self.update_bytes += sum(tensor.size_bytes for tensor in update.begin.tensors)

        current.observe(ended)

    def time_switches(self, lifecycle: Lifecycle, now: Callable[[], float]) -> None:
        """Counts, from now on, how long the server is UPDATING each time."""
        began: float | None = None

        def changed(state: ServerState) -> None:
            nonlocal began
            if state is ServerState.UPDATING:
                began = now()
            elif began is not None:
                self.switch_s.add(now() - began)
                began = None

        lifecycle.observe(changed)
