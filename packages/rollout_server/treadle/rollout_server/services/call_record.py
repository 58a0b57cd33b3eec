"""The record of one Generate call: its times, its counts, and its spans.

Invariant: events are timed when the engine reports them, and counted when they are about to be
sent. The time of a call is `queue` until its sequence starts, `prefill` until its first token, then
`decode`; `paused` is the part of the latter two in which the engine sampled nothing. The spans are
recorded when the call ends, below the span that is open then.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import grpc.aio

from treadle.rollout_server.engine import EngineEvent, Finished, Started, Tokens
from treadle.rollout_server.errors import RolloutServerError
from treadle.rollout_server.observability.server_stats import ServerStats
from treadle.rollout_server.scheduling.pauses import Pauses
from treadle.rollout_server.services.errors import reason_name
from treadle.rollout_server.services.event_message import Numbers
from treadle.tracing import SpanHandle, record_span

_log = logging.getLogger(__name__)


class CallRecord:
    """Times and counts one completion. A context manager: leaving it ends the completion.

    Args:
        now: Returns the clock's time in seconds.
    """

    __slots__ = (
        "_began",
        "_began_unix_ns",
        "_first_token",
        "_now",
        "_outcome",
        "_pause",
        "_started",
        "_stats",
        "_trace",
        "num_tokens",
    )

    def __init__(
        self, stats: ServerStats, pauses: Pauses, now: Callable[[], float], trace: SpanHandle
    ) -> None:
        self._stats = stats
        self._pause = pauses.last
        self._now = now
        self._trace = trace
        self._began = now()
        self._began_unix_ns = time.time_ns()
        self._started: float | None = None
        self._first_token: float | None = None
        self._outcome = "cancelled"
        self.num_tokens = 0

    def arrived(self, event: EngineEvent) -> None:
        """Times an event of the engine."""
        if isinstance(event, Tokens):
            if self._first_token is None:
                self._first_token = self._now()
        elif isinstance(event, Started):
            self._started = max(self._began, self._now() - event.since_s)
        elif not isinstance(event, Finished):
            return  # Log-probs of a prompt; the prefill ends with the first token.
        elif event.prefill_s is not None and self._started is not None:
            self._first_token = min(self._now(), self._started + event.prefill_s)

    def note(self, events: Sequence[EngineEvent], prompt_tokens: int) -> None:
        """Counts events that are about to be sent."""
        stats = self._stats
        for event in events:
            if isinstance(event, Tokens):
                self.num_tokens += len(event.token_ids)
                stats.sampled_tokens += len(event.token_ids)
            elif isinstance(event, Started):
                assert self._started is not None, "an event was not timed"
                stats.queue_s.add(self._started - self._began)
                stats.prompt_tokens += prompt_tokens
                stats.cached_prompt_tokens += event.cached_prompt_tokens
                self._trace.set(cached_prompt_tokens=event.cached_prompt_tokens)
            elif isinstance(event, Finished):
                self._outcome = event.reason.value

    def numbers(self) -> Numbers:
        """Returns the numbers that messages carry."""
        now = self._now()
        started = now if self._started is None else self._started
        first_token = now if self._first_token is None else self._first_token
        return {
            "queue_s": started - self._began,
            "engine_s": now - started,
            "prefill_s": first_token - started,
            "paused_s": sum(stop - start for start, stop in self._pause.since(started, now)),
            "num_tokens": self.num_tokens,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RolloutServerError):
            self._outcome = reason_name(error).lower()
        elif isinstance(error, Exception) and not isinstance(error, grpc.aio.BaseError):
            self._outcome = "bug"  # Else gRPC could not write: the caller has gone.
        self._stats.completions[self._outcome] += 1
        if self._started is not None:
            self._stats.engine_s.add(self._now() - self._started)
        if self._trace.recording:
            self._trace.set(tokens=self.num_tokens, outcome=self._outcome)
            self._record_spans()
        if _log.isEnabledFor(logging.DEBUG):
            numbers = self.numbers()
            _log.debug(
                "%s after %d tokens, %.3f s in the queue, %.3f s in the engine",
                self._outcome,
                self.num_tokens,
                numbers["queue_s"],
                numbers["engine_s"],
            )

    def _record_spans(self) -> None:
        for name, start, stop in self._phases():
            record_span(
                name,
                start_unix_ns=self._began_unix_ns + round((start - self._began) * 1e9),
                duration_ns=round((stop - start) * 1e9),
            )

    def _phases(self) -> Iterator[tuple[str, float, float]]:
        """Yields the names of the parts of the call, and when each began and ended."""
        now = self._now()
        yield "queue", self._began, now if self._started is None else self._started
        if self._started is None:
            return
        yield "prefill", self._started, now if self._first_token is None else self._first_token
        if self._first_token is not None:
            yield "decode", self._first_token, now
        for start, stop in self._pause.since(self._started, now):
            yield "paused", start, stop
