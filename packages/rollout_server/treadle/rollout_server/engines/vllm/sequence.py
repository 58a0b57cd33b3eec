"""A sequence: buffers events between vLLM's output handler and the consumer of `generate`.

Invariant: a sequence that started ends exactly once, as finished or aborted, and counts as
running in between, whether or not its consumer reads. Each token keeps the version label that
vLLM's core gave it, however late the consumer reads it.

vLLM puts its outputs here on the event loop's thread (`put` replaces that of its own collector)
and never waits. The consumer waits for events and is woken by `put`, `interrupt` or `fail`;
a pause waits in `InFlightCounter.wait_zero` for the last running sequence.

This module does not import vLLM; it relies on the attributes of outputs only.
"""

import asyncio
import math
import time
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
    PromptLogprobs,
    Started,
    Tokens,
)

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class InFlightCounter:
    """A counter with a wait for it to become zero."""

    def __init__(self) -> None:
        self._zero = asyncio.Event()
        self._zero.set()
        self.count = 0

    def increment(self) -> None:
        """Adds one."""
        self.count += 1
        self._zero.clear()

    def decrement(self) -> None:
        """Subtracts one."""
        self.count -= 1
        if not self.count:
            self._zero.set()

    async def wait_zero(self) -> None:
        """Waits until the counter is zero."""
        await self._zero.wait()


class SequenceStats:
    """Numbers of sequences by outcome."""

    def __init__(self) -> None:
        self.running = InFlightCounter()
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
        """Counts the end of a running sequence."""
        self._finished += finished
        self._aborted += not finished
        self.running.decrement()


class VersionedState(Protocol):
    """The part of vLLM's `RequestState` that this module reads."""

    weight_version_starts: list[tuple[str, int]]
    """Pairs of a weight version and the index of the first token that it sampled, in order."""
    routed_experts_chunks: list[Any]
    """Arrays of experts, [rows, layers, experts], of consecutive rows that are not yet taken."""


class Sequence:
    """The state of one request in vLLM."""

    def __init__(self, request: EngineRequest, stats: SequenceStats) -> None:
        self.request = request
        self.started = self.ended = False
        self._stats = stats
        self._state: VersionedState | None = None
        self._submitted_at = time.monotonic()
        self._num_tokens = 0
        self._events: deque[EngineEvent | Exception | None] = deque()  # None: withdrawn.
        self._woken = asyncio.Event()

    def submitted(self, state: VersionedState) -> None:
        """Records that vLLM has the sequence; `state` has the version labels of its tokens."""
        self._state = state
        self._submitted_at = time.monotonic()

    def put(self, output: Any) -> None:
        """Takes one `RequestOutput`; ignores exceptions, because the engine calls `fail`."""
        if self.ended or isinstance(output, Exception):
            return
        completion = output.outputs[0]
        reason = completion.finish_reason if output.finished else None
        if completion.token_ids:
            self._start(output.num_cached_tokens)
            if output.prompt_logprobs:  # All of them come with the first token.
                self._take_prompt(output.prompt_logprobs.logprobs)
            asks = self.request.sampling_mask
            masks = map(bytes, completion.sampling_mask.token_ids) if asks else ()
            self._take(completion.token_ids, completion.logprobs, tuple(masks))
        if self.ended:  # `_take` may have failed it.
            return
        if reason in _REASONS:
            self._end(_REASONS[reason])
        elif reason == "abort":
            self.interrupt() if self.started else self.withdraw()
        elif reason is not None:
            self.fail(RuntimeError(f"vLLM ended a sequence as {reason!r}"))

    def withdraw(self) -> None:
        """Records that vLLM returned the sequence without a token; it must be submitted again."""
        self._state = None
        self._emit(None)

    def interrupt(self) -> None:
        """Ends the sequence as INTERRUPTED, with the tokens it has."""
        if not self.ended:
            self._start(0)
            self._end(FinishReason.INTERRUPTED)

    def fail(self, error: Exception) -> None:
        """Ends the sequence with the error that broke the engine."""
        if not self.ended:
            self._close(finished=False)
            self._emit(error)

    def abort(self) -> None:
        """Ends the sequence without an event, because its consumer is gone."""
        if not self.ended:
            self._close(finished=False)

    async def events(self) -> AsyncIterator[EngineEvent]:
        """Yields the events until the sequence ends or is withdrawn.

        Raises:
            Exception: The error that broke the engine.
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
            self._stats.running.increment()
            # vLLM tells of a sequence with its first token.
            self._emit(Started(cached_prompt_tokens, time.monotonic() - self._submitted_at))

    def _take_prompt(self, logprobs: Many[float]) -> None:
        """Emits the log-probs of the prompt that are wanted; vLLM has them of all ids but one."""
        assert self._state is not None and self.request.prompt_logprobs_from is not None
        wanted = tuple(logprobs[self.request.prompt_logprobs_from - 1 :])
        if any(map(math.isnan, wanted)):
            self._fail_not_finite()
        elif wanted:
            version, _ = self._state.weight_version_starts[0]
            self._emit(PromptLogprobs(wanted, int(version)))

    def _fail_not_finite(self) -> None:
        self.fail(FloatingPointError("the model's logits are not finite: load other weights"))

    def _take(self, token_ids: Many[int], logprobs: Any, masks: tuple[bytes, ...]) -> None:
        """Emits new tokens, grouped by weight version."""
        if self.ended:  # Its prompt failed it.
            return
        assert self._state is not None
        shown = tuple(logprobs.logprobs) if self.request.logprobs else ()
        if any(map(math.isnan, shown)):
            self._fail_not_finite()
            return
        first, total = self._num_tokens, self._num_tokens + len(token_ids)
        self._num_tokens = total
        labels = self._state.weight_version_starts
        stops = [*(start for _, start in labels[1:]), total]
        for (label, start), stop in zip(labels, stops, strict=True):
            part = slice(max(start - first, 0), max(stop - first, 0))
            if part.start < part.stop:
                routed = self._take_experts() if part.stop == len(token_ids) else b""
                ids = tuple(token_ids[part])
                self._emit(Tokens(ids, shown[part], int(label), routed, masks[part]))

    def _take_experts(self) -> bytes:
        assert self._state is not None
        chunks = self._state.routed_experts_chunks
        routed = b"".join(chunk.tobytes() for chunk in chunks)
        chunks.clear()
        return routed

    def _end(self, reason: FinishReason) -> None:
        self._start(0)
        self._close(finished=True)
        self._emit(Finished(reason))

    def _close(self, *, finished: bool) -> None:
        self.ended = True
        if self.started:
            self._stats.end(finished=finished)

    def _emit(self, event: EngineEvent | Exception | None) -> None:
        self._events.append(event)
        self._woken.set()
