"""The sink of a process that serves others, such as a rollout server or a router.

Invariant: what is open inside the block is closed after it, with all spans written or counted.
`serving_span` decides which calls are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from treadle.tracing.jsonl import JsonlSink
from treadle.tracing.sink import Fanout, TraceSink


@contextmanager
def service_sink(*, jsonl: Path | None, otlp: str | None, service: str) -> Iterator[TraceSink]:
    """Opens the sinks of a serving process; without any, the sink does not record.

    Args:
        jsonl: A file to append to.
        otlp: Address of an OpenTelemetry endpoint, as http://localhost:4318.
        service: Name of the process there.

    Raises:
        OSError: The file cannot be opened.
        ValueError: OpenTelemetry is not installed, or its address is none.
    """
    with ExitStack() as stack:
        sinks: list[TraceSink] = []
        if jsonl is not None:
            sinks.append(stack.enter_context(JsonlSink(jsonl)))
        if otlp is not None:
            try:
                from treadle.tracing.sinks.otlp import OtlpSink
            except ImportError as error:
                raise ValueError(
                    f"tracing to {otlp} needs OpenTelemetry ({error}): "
                    "pip install 'treadle-tracing[otlp]'"
                ) from error
            sinks.append(stack.enter_context(OtlpSink(otlp, service)))
        yield Fanout(*sinks)
