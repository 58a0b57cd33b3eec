"""A sequence: what stands between vLLM's output handler and the consumer of `generate`.

Invariant: a sequence that started ends exactly once, as finished or aborted, and it counts as
running in between, whether or not its consumer reads. Each token keeps the label that vLLM's
core gave it when it left; how late the consumer takes it changes nothing.

vLLM puts its outputs here on the event loop's thread (`put` takes the place of its own
collector's) and never waits. The consumer waits for events and is woken by `put`, `interrupt`
or `fail`; `UnderWay.zero` is where a pause waits for the last running sequence.

Nothing here imports vLLM; outputs are taken by their shape.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many
from typing import Any, Protocol

from treadle.rollout_server.engine import (
    EngineCounters,
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    Started,
    Tokens,
)

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class UnderWay:
    """A number of things under way, and a wait for it to become zero."""

    def __init__(self) -> None:
        self._zero = asyncio.Event()
        self._zero.set()
        self.count = 0

    def enter(self) -> None:
        """One more."""
        self.count += 1
        self._zero.clear()

    def leave(self) -> None:
        """One less."""
        self.count -= 1
        if not self.count:
            self._zero.set()

    async def zero(self) -> None:
        """Waits until nothing is under way."""
        await self._zero.wait()


class Ledger:
    """What became of the sequences."""

    def __init__(self) -> None:
        self.running = UnderWay()
        self._finished = self._aborted = 0

    @property
    def counters(self) -> EngineCounters:
        """The numbers so far."""
        running = self.running.count
        return EngineCounters(
            started=self._finished + self._aborted + running,
            finished=self._finished,
            aborted=self._aborted,
            running=running,
        )

    def end(self, *, finished: bool) -> None:
        """A running sequence ended."""
        self._finished += finished
        self._aborted += not finished
        self.running.leave()


class LabelledState(Protocol):
    """The part of vLLM's `RequestState` that is read here."""

    weight_version_starts: list[tuple[str, int]]
    """Weight version -> index of the first token that it sampled, in order."""


class Sequence:
    """One request on its way through vLLM.

    Args:
        request: What is asked for.
        ledger: Where it is counted.
    """

    def __init__(self, request: EngineRequest, ledger: Ledger) -> None:
        self.request = request
        self.started = self.ended = False
        self._ledger = ledger
        self._state: LabelledState | None = None
        self._num_tokens = 0
        self._events: deque[EngineEvent | Exception | None] = deque()  # None: it was withdrawn.
        self._woken = asyncio.Event()

    def submitted(self, state: LabelledState) -> None:
        """It is with vLLM from now on, and labels its tokens in `state`."""
        self._state = state

    def put(self, output: Any) -> None:
        """Takes one `RequestOutput`. An exception ends the engine, which says so by `fail`."""
        if self.ended or isinstance(output, Exception):
            return
        completion = output.outputs[0]
        reason = completion.finish_reason if output.finished else None
        if completion.token_ids:
            self._start(output.num_cached_tokens)
            self._take(completion.token_ids, completion.logprobs)
        if self.ended:  # By what it took.
            return
        if reason in _REASONS:
            self._end(_REASONS[reason])
        elif reason == "abort":
            self.interrupt() if self.started else self.withdraw()
        elif reason is not None:
            self.fail(RuntimeError(f"vLLM ended a sequence as {reason!r}"))

    def withdraw(self) -> None:
        """Says that vLLM no longer has it; it sampled nothing and is to be submitted again."""
        self._state = None
        self._emit(None)

    def interrupt(self) -> None:
        """Ends it with what it has."""
        if not self.ended:
            self._start(0)
            self._end(FinishReason.INTERRUPTED)

    def fail(self, error: Exception) -> None:
        """Ends it with the error that broke the engine."""
        if not self.ended:
            self._close(finished=False)
            self._emit(error)

    def abort(self) -> None:
        """Ends it without a word, since nobody reads on."""
        if not self.ended:
            self._close(finished=False)

    async def events(self) -> AsyncIterator[EngineEvent]:
        """The events until it ends or is withdrawn.

        Raises:
            Exception: That which broke the engine.
        """
        while True:
            while not self._events:
                self._woken.clear()
                await self._woken.wait()
            event = self._events.popleft()
            if event is None:
                return
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Finished):
                return

    def _start(self, cached_prompt_tokens: int) -> None:
        if not self.started:
            self.started = True
            self._ledger.running.enter()
            self._emit(Started(cached_prompt_tokens))

    def _take(self, token_ids: Many[int], logprobs: Any) -> None:
        """Emits new tokens, those of one weight version together."""
        assert self._state is not None
        shown = tuple(logprobs.logprobs) if self.request.logprobs else ()
        if any(map(math.isnan, shown)):
            self.fail(FloatingPointError("the model's logits are not finite: load other weights"))
            return
        first, total = self._num_tokens, self._num_tokens + len(token_ids)
        self._num_tokens = total
        labels = self._state.weight_version_starts
        stops = [*(start for _, start in labels[1:]), total]
        for (label, start), stop in zip(labels, stops, strict=True):
            part = slice(max(start - first, 0), max(stop - first, 0))
            if part.start < part.stop:
                self._emit(Tokens(tuple(token_ids[part]), shown[part], int(label)))

    def _end(self, reason: FinishReason) -> None:
        self._start(0)
        self._close(finished=True)
        self._emit(Finished(reason))

    def _close(self, *, finished: bool) -> None:
        self.ended = True
        if self.started:
            self._ledger.end(finished=finished)

    def _emit(self, event: EngineEvent | Exception | None) -> None:
        self._events.append(event)
        self._woken.set()
