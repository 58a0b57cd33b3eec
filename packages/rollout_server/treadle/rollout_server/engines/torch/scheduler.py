"""The scheduler: which sequences run, in which cache rows, and what a step reads.

Invariant: running sequences hold rows 0 to n-1 without a hole, those that decode before
those that still read their prompt, so that a step's rows are always a prefix of the rows.
Whoever leaves is replaced by moves of at most two rows, which the caller repeats in the
cache.

Who waits: a request waits for a free row, highest priority first, first come first served
within one priority. It also waits one step or so when a sequence that is reading its prompt
right now will provide a longer shared prefix than the cache has: eight samples of one
prompt read it once, not eight times. It never waits for a sequence that is not itself
reading, so it cannot wait for ever.

Pure bookkeeping: no tensors, no threads, no clock.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from treadle.rollout_server.engines.torch.prefix import PrefixCache
from treadle.rollout_server.engines.torch.sequence import Sequence

_WORTH_WAITING_TOKENS = 32  # A shared prefix longer by this much beats starting at once.


class Move(NamedTuple):
    """Cache row `source` becomes row `target`."""

    source: int
    target: int


class Work(NamedTuple):
    """What a step reads of one sequence: its next `num_ids` uncached ids."""

    sequence: Sequence
    num_ids: int


class Scheduler:
    """Waiting and running sequences.

    Args:
        max_rows: Most sequences that run at once.
        max_step_tokens: Most ids that a step reads; at least `max_rows`, so that decoding
            never waits for prompts.
    """

    def __init__(self, *, max_rows: int, max_step_tokens: int) -> None:
        if max_step_tokens < max_rows:
            raise ValueError(
                f"max_step_tokens is {max_step_tokens}, below max_rows {max_rows}: "
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
        """Sequences without a row."""
        return len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        heapq.heappush(self._waiting, (-sequence.request.priority, next(self._arrivals), sequence))

    def withdraw(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out of the queue."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
        heapq.heapify(self._waiting)

    def drain_waiting(self) -> list[Sequence]:
        """Empties the queue."""
        waiting, self._waiting = [entry[2] for entry in self._waiting], []
        return waiting

    def admit(self, cached_tokens: Callable[[bytes], int]) -> Iterator[Sequence]:
        """Gives rows to waiting sequences; yields each, its row set, before the next.

        The caller fills the row from the prefix cache and sets `num_cached` between two.
        Stops when the rows are full or the prompts let in fill a step.

        Args:
            cached_tokens: How many ids of a prompt key the prefix cache holds, to decide
                whether waiting for a longer prefix pays.
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

    def plan(self) -> list[Work]:
        """What the next step reads: of rows 0, 1, 2 and so on, until the step is full."""
        room = self.max_step_tokens
        work = []
        for sequence in self.running:
            if not room:
                break
            num_ids = min(sequence.num_uncached, room)
            work.append(Work(sequence, num_ids))
            room -= num_ids
        return work

    def prompt_read(self, sequence: Sequence) -> None:
        """Notes that a sequence has its whole prompt in the cache now."""
        self._reading.remove_live(sequence.prompt_key, sequence)

    def remove(self, sequence: Sequence) -> list[Move]:
        """Takes a running sequence out.

        Returns:
            The moves that close the hole, to be made in this order.
        """
        assert sequence.row is not None
        self._reading.remove_live(sequence.prompt_key, sequence)
        hole, sequence.row = sequence.row, None
        num_decoding = sum(s.num_sampled > 0 for s in self.running)
        moves = []
        # The last decoding row fills the hole, and the last row of all fills that one's.
        for source in (num_decoding - 1, len(self.running) - 1):
            if hole < source:
                moved = self.running[source]
                self.running[hole], moved.row = moved, hole
                moves.append(Move(source, hole))
                hole = source
        self.running.pop()
        return moves
