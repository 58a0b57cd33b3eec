"""The sinks of a run: its spans go to each of `tracing.backends`, through the filter if one is set.

Invariant: no backend delays or fails the run. A span that a backend does not take is counted, and
the loss is one warning. The client of a service runs in a separate process.

Who waits: only the end of the run, for the backends to finish, up to `run.loggers_timeout_s`; all
backends finish side by side.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from treadle.agent_loop import AgentTask
from treadle.tracing import (
    Fanout,
    JsonlSink,
    TraceFilter,
    TraceSampler,
    TraceSink,
    use_attributes,
    use_sink,
)
from treadle.tracing.sinks import mlflow
from treadle.tracing.sinks.child_sink import ChildSink
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.environment import child_environment
from treadle.trainer.launch.process import child_python_path
from treadle.trainer.loggers.loggers import AFTER_CANCEL_S, run_id

__all__ = ["expect_traces", "run_tracing", "span_attributes"]

_SERVICE = "treadle-trainer"

_filter: ContextVar[TraceFilter | None] = ContextVar("treadle_trace_filter", default=None)


@asynccontextmanager
async def run_tracing(
    config: Config, run_dir: Path, note: Callable[[str], None]
) -> AsyncIterator[None]:
    """Sends the spans of this block to the backends of the configuration.

    Args:
        note: Shows one line to the user.
    """
    if not config.tracing.backends:
        yield
        return
    path = run_dir / "traces.jsonl"
    before = path.stat().st_size if path.exists() else 0
    sinks = [_open(name, config, run_dir) for name in config.tracing.backends]
    for line in _where(config):
        note(line)

    def bytes_written() -> int:
        return max(s.bytes_written + before * isinstance(s, JsonlSink) for s in sinks)

    async def close(timeout_s: float) -> None:
        await asyncio.gather(*(sink.aclose(timeout_s) for sink in sinks))

    limit = config.run.loggers_timeout_s
    try:
        with _filtered(config, Fanout(*sinks), bytes_written) as sink, use_sink(sink):
            yield
    except asyncio.CancelledError:
        await close(min(limit, AFTER_CANCEL_S))
        raise
    except BaseException:
        await close(limit)
        raise
    await close(limit)


def span_attributes(
    config: Config, tasks: Sequence[AgentTask], *, step: int, validate: bool
) -> AbstractContextManager[None]:
    """Adds to all spans of a block which trajectories they are of, by verl's names.

    Args:
        tasks: Tasks of the trajectories, in any order.
        validate: The trajectories are not trained on.
    """
    expect_traces(step, (task.sample_index for task in tasks), validate=validate)
    return use_attributes(step=step, validate=validate, experiment_name=config.run.name)


def expect_traces(step: int, sample_indices: Iterable[int], *, validate: bool = False) -> None:
    """Chooses which of the rows that begin now are traced, if the configuration limits traces.

    Args:
        validate: The trajectories are not trained on.
    """
    if (chosen := _filter.get()) is not None:
        chosen.expect(step, sample_indices, validate=validate)


def _open(name: str, config: Config, run_dir: Path) -> JsonlSink | ChildSink:
    if name == "jsonl":
        return JsonlSink(run_dir / "traces.jsonl")
    project = config.run.project
    settings: dict[str, Any] = {"project": project}
    if name == "otlp":
        settings = {"endpoint": config.tracing.otlp_endpoint, "service": _SERVICE}
    elif name == "weave" and "wandb" in config.run.loggers:
        settings["run_id"] = run_id(run_dir)
    return ChildSink(
        name,
        settings,
        environment=child_environment(child_python_path(), {}),
        log_path=run_dir / "logs" / f"traces-{name}.log",
    )


def _where(config: Config) -> Iterator[str]:
    """Yields how the traces are looked at, where that is not known from the configuration."""
    if "mlflow" in config.tracing.backends:
        command = mlflow.ui_command(mlflow.tracking_uri())
        if command is not None:
            yield f"traces in MLflow: {command}"


@contextmanager
def _filtered(
    config: Config, sink: TraceSink, bytes_written: Callable[[], int]
) -> Iterator[TraceSink]:
    """Yields the sink, behind a filter if the configuration limits traces."""
    tracing = config.tracing
    max_samples = tracing.max_samples_per_step_per_worker
    if tracing.sample_rate == 1.0 and max_samples is None and tracing.max_bytes is None:
        yield sink
        return
    chosen = TraceFilter(
        sink,
        TraceSampler(rate=tracing.sample_rate, seed=config.run.seed),
        max_samples=max_samples,
        max_bytes=tracing.max_bytes,
        bytes_written=bytes_written,
    )
    token = _filter.set(chosen)
    try:
        yield chosen
    finally:
        _filter.reset(token)
        chosen.close()
