"""The scheduler: which sequences run, in which cache rows, and what a step reads.

Invariant: running sequences occupy rows 0 to n-1 without a gap, decoding sequences before those
in prefill, so the rows of a step are always the first ones. Removing a sequence moves at most
two rows; the caller repeats these moves in the cache.

Who waits: a request waits for a free row, highest priority first, first come first served
within one priority. It also waits for a step or so if a sequence in prefill will soon provide
a longer shared prefix than the cache has: eight samples of one prompt read it once, not eight
times. It waits only for sequences that are in prefill, so it cannot wait forever.

Pure bookkeeping: no tensors, no threads, no clock.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from treadle.rollout_server.engines.torch.prefix_cache import PrefixCache
from treadle.rollout_server.engines.torch.sequence import Sequence

_WORTH_WAITING_TOKENS = 32  # Waiting pays if the shared prefix grows by at least this much.


class RowMove(NamedTuple):
    """Moves cache row `source` to row `target`."""

    source: int
    target: int


class ScheduledIds(NamedTuple):
    """The ids of one sequence in a step: its next `num_ids`, uncached ones and then its draft's."""

    sequence: Sequence
    num_ids: int


class Scheduler:
    """Waiting and running sequences.

    Args:
        max_rows: Maximum number of running sequences.
        max_step_tokens: Maximum number of ids in a step; at least `max_rows`, so that decoding
            never waits for prefill.
    """

    def __init__(self, *, max_rows: int, max_step_tokens: int) -> None:
        if max_step_tokens < max_rows:
            raise ValueError(
                f"max_step_tokens must be at least max_rows, got {max_step_tokens} and {max_rows}: "
                "every running sequence must be able to decode in every step"
            )
        self.max_rows = max_rows
        self.max_step_tokens = max_step_tokens
        self.running: list[Sequence] = []
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrivals = itertools.count()
        self._reading: PrefixCache[Sequence] = PrefixCache(0)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a row."""
        return len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        heapq.heappush(self._waiting, (-sequence.request.priority, next(self._arrivals), sequence))

    def withdraw(self, sequence: Sequence) -> None:
        """Removes a waiting sequence from the queue."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
        heapq.heapify(self._waiting)

    def drain_waiting(self) -> list[Sequence]:
        """Empties the queue and returns its sequences."""
        waiting, self._waiting = [entry[2] for entry in self._waiting], []
        return waiting

    def admit(self, cached_tokens: Callable[[bytes], int]) -> Iterator[Sequence]:
        """Assigns rows to waiting sequences and yields each of them.

        The caller fills the row from the prefix cache and sets `num_cached` before it requests
        the next sequence. Stops when all rows are taken or the admitted prompts fill a step.

        Args:
            cached_tokens: Returns the number of ids of a prompt key that the prefix cache
                holds, to decide whether waiting for a longer prefix pays.
        """
        deferred = []
        unread = sum(sequence.num_uncached for sequence in self.running)
        while self._waiting and len(self.running) < self.max_rows and unread < self.max_step_tokens:
            entry = heapq.heappop(self._waiting)
            sequence = entry[2]
            soon, _ = self._reading.longest(sequence.prompt_key)
            if soon >= _WORTH_WAITING_TOKENS:
                gain = soon - cached_tokens(sequence.prompt_key)
                if gain >= _WORTH_WAITING_TOKENS:
                    deferred.append(entry)
                    continue
            sequence.row = len(self.running)
            self.running.append(sequence)
            self._reading.add_live(sequence.prompt_key, sequence)
            yield sequence
            unread += sequence.num_uncached
        for entry in deferred:
            heapq.heappush(self._waiting, entry)

    def plan(self) -> list[ScheduledIds]:
        """Plans the next step: ids of rows 0, 1, 2 and so on, until the step is full."""
        room = self.max_step_tokens
        work = []
        for sequence in self.running:
            if not room:
                break
            num_ids = min(sequence.num_uncached + len(sequence.draft), room)
            work.append(ScheduledIds(sequence, num_ids))
            room -= num_ids
        return work

    def prefill_done(self, sequence: Sequence) -> None:
        """Marks the prefill of a sequence as complete."""
        self._reading.remove_live(sequence.prompt_key, sequence)

    def remove(self, sequence: Sequence) -> list[RowMove]:
        """Removes a running sequence.

        Returns:
            The row moves that close the gap, in order.
        """
        assert sequence.row is not None
        self._reading.remove_live(sequence.prompt_key, sequence)
        hole, sequence.row = sequence.row, None
        num_decoding = sum(s.num_sampled > 0 for s in self.running)
        moves = []
        # The last decoding row fills the gap, and the last row of all fills the gap it leaves.
        for source in (num_decoding - 1, len(self.running) - 1):
            if hole < source:
                moved = self.running[source]
                self.running[hole], moved.row = moved, hole
                moves.append(RowMove(source, hole))
                hole = source
        self.running.pop()
        return moves
