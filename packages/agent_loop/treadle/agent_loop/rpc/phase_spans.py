"""Spans of where a completion's time went, from what the server reports of it.

Invariant: lengths are the server's. Positions are this process's: the phases follow one another and
end with the call, as if its answer had taken no time on the way. Only the server's own spans have
the position of a pause; here a pause ends with the call.
"""

import time

from treadle.agent_loop.rpc.completion_stream import CompletionStream
from treadle.tracing import current_sink, record_span


def record_phases(stream: CompletionStream, *, call: int) -> None:
    """Records `queue`, `prefill`, `decode` and `paused` of a call that has ended just now.

    A server that predates prefill and paused times has a `queue` only.

    Args:
        call: Number of the call within its completion, from 1.
    """
    if not current_sink().recording:
        return
    end = time.time_ns()
    start = end - _ns(stream.queue_s + stream.engine_s)
    phases = [("queue", start, stream.queue_s)]
    if stream.prefill_s is not None:
        decode_s = max(0.0, stream.engine_s - stream.prefill_s)
        phases.append(("prefill", end - _ns(stream.engine_s), stream.prefill_s))
        phases.append(("decode", end - _ns(decode_s), decode_s))
        if stream.paused_s:
            phases.append(("paused", end - _ns(stream.paused_s), stream.paused_s))
    for name, began, seconds in phases:
        record_span(
            name,
            start_unix_ns=began,
            duration_ns=_ns(seconds),
            server=stream.address,
            call=call,
        )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
