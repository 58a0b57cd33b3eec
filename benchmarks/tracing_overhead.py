"""What tracing costs a rollout: 1,000 trajectories at a time with each backend, against none.

One loop (`tool_agent`: render, generate, parse, call a tool, extend) with an engine in the process
that sleeps for as long as a completion takes and computes nothing. The backends take turns within
each round: none, JSONL, MLflow with SQLite, OpenTelemetry to a collector in another process. The
clients of the last two run in a process each, as in a run.

The clock stops when the last trajectory has ended. CPU time is the driver's own, whose event loop
is what tracing could hold up; how much of the spans a backend had written by then, and how many it
dropped, is said beside it. The ratio of wall time is within a round.

    python benchmarks/tracing_overhead.py [--rounds 5] [--trajectories 1000] [--turns 5]
        [--turn-s 3.0] [--out results.json]
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loop_subject import CALL, LAST, InProcess, run_loop
from null_server import Script

from treadle.agent_loop import Completion, PlacedImage, RequestContext, SamplingParams
from treadle.tracing import JsonlSink, NullSink, QueuedSink, span, use_sink
from treadle.tracing.sinks.child_sink import ChildSink

_BACKENDS = ("none", "jsonl", "mlflow", "otlp")


class Sleeping(InProcess):
    """The null engine, whose completions take `turn_s` on average."""

    def __init__(self, turns: int, turn_s: float) -> None:
        super().__init__(Script(call=CALL, last=LAST, turns=turns))
        self._turn_s = turn_s
        self._random = random.Random(0)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Replies after half to one and a half times the average."""
        await asyncio.sleep(self._turn_s * self._random.uniform(0.5, 1.5))
        return await super().generate(prompt, params, request=request, images=images)


def collect() -> None:
    """Serves an OTLP endpoint that reads each request, until standard input ends."""
    from treadle.tracing.sinks.testing import Answer, Request, http_server, otlp_spans

    def answer(request: Request) -> Answer:
        otlp_spans(request)
        return 200, "application/x-protobuf", b""

    with http_server(answer) as address:
        print(address, flush=True)
        sys.stdin.read()


@contextmanager
def collector() -> Iterator[str]:
    """A collector process; yields its address."""
    command = [sys.executable, __file__, "--collect"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def open_sink(backend: str, folder: Path, address: str) -> QueuedSink | None:
    """Returns the backend's sink, writing; None for none."""
    if backend == "none":
        return None
    sink: QueuedSink
    if backend == "jsonl":
        sink = JsonlSink(folder / "traces.jsonl")
    else:
        settings = {"project": "benchmark"}
        if backend == "otlp":
            settings = {"endpoint": address, "service": "benchmark"}
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlruns.db",
        }
        sink = ChildSink(
            backend,
            settings,
            environment=environment,
            log_path=folder / f"{backend}.log",
            close_timeout_s=300.0,
        )
    with use_sink(sink), span("warm up"):
        pass
    while not sink.report.written:  # its client is made
        time.sleep(0.05)
    return sink


async def measure(
    backend: str, folder: Path, address: str, arguments: argparse.Namespace
) -> dict[str, float]:
    """Returns the times of one rollout, and what became of its spans."""
    sink = await asyncio.to_thread(open_sink, backend, folder, address)
    engine = Sleeping(arguments.turns, arguments.turn_s)
    with use_sink(sink or NullSink()):
        cpu_s, began = time.process_time(), time.perf_counter()
        found = await run_loop(engine, range(arguments.trajectories))
        wall_s = time.perf_counter() - began
        cpu_s = time.process_time() - cpu_s
    assert len(found) == arguments.trajectories
    times = {"wall_s": wall_s, "cpu_ms": cpu_s / arguments.trajectories * 1000}
    if sink is None:
        return times
    at_end = sink.report.written
    report = await sink.aclose()
    total = report.written + report.dropped + report.failed
    return {
        **times,
        "spans": total,
        "written_at_end": at_end / total,
        "lost": (report.dropped + report.failed) / total,
    }


async def run_all(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Every backend in turn, after one round to warm up."""
    rows: dict[str, list[dict[str, float]]] = {}
    with collector() as address, tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds + 1):
            for backend in _BACKENDS:
                row = await measure(backend, Path(folder), address, arguments)
                if number:
                    rows.setdefault(backend, []).append(row)
    return rows


def print_table(rows: dict[str, list[dict[str, float]]]) -> None:
    """Medians over the rounds with their range; ratios to no tracing of the same round."""
    none = rows["none"]
    for backend, results in rows.items():
        pairs = list(zip(results, none, strict=True))
        ratios = [mine["wall_s"] / theirs["wall_s"] for mine, theirs in pairs]
        line = (
            f"{backend:8} wall {_spread([r['wall_s'] for r in results], 2)} s, "
            f"ratio {_spread(ratios, 3)}, "
            f"driver's CPU per trajectory {_spread([r['cpu_ms'] for r in results], 2)} ms"
        )
        if backend != "none":
            line += (
                f", {results[0]['spans']:,.0f} spans, written at the end of the rollout "
                f"{_spread([r['written_at_end'] for r in results], 2)}, "
                f"lost {_spread([r['lost'] for r in results], 3)}"
            )
        print(line)


def _spread(values: Sequence[float], digits: int) -> str:
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


def main() -> None:
    """Prints the table; writes the numbers with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn-s", type=float, default=3.0)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.collect:
        collect()
        return
    rows = asyncio.run(run_all(arguments))
    print_table(rows)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
