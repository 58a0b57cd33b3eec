"""Latency that the server adds to a completion, and completions per second per server core.

The engine does no work (`null_engine.py`), so all cost is that of the server. Two figures:

- *added latency*: 64 concurrent calls with an engine that takes some time (`--work_ms`); the time
  of a call minus that of the engine alone in this process, in the same round. With an engine that
  takes no time, calls only wait for each other: 64 in flight at N calls per second take 64/N
  seconds each, whatever a call costs.
- *calls per second*: with an engine that takes no time, the server's process pinned to one core and
  the load (`generate_load.py`) to the others. If the load cannot saturate that core, the calls per
  second of the server's CPU time are what one core would serve.

The baseline of both, in the same rounds, is a bare grpc.aio handler that sends constant bytes, as
one message and as three, in a process with the same event loop. Like the server, it sends the last
message with the status.

    python benchmarks/generate_overhead.py [--rounds 5] [--seconds 3] [--work_ms 200] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop
from generate_load import CONCURRENCY, METHOD, keep_in_flight, percentiles
from null_engine import COMMAND, COMPLETION_TOKENS, NullEngine

from treadle.rollout_server.engine import EngineRequest, Sampling
from treadle.rollout_server.testing.process import running_server

_ALONE = "engine alone"
_HERE = Path(__file__).parent
_ANSWER = bytes(300)  # The size of 32 tokens with log-probabilities.


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A measured server process, and how clients call it."""

    name: str
    address: str
    pid: int
    batched: bool = False
    many: bool = False


async def serve_bare(messages: int) -> None:
    """Serves the baseline until standard input ends; prints its port."""

    async def handle(request: bytes, context: Any) -> bytes:
        for _ in range(messages - 1):
            await context.write(_ANSWER)
        return _ANSWER

    server = grpc.aio.server()
    service, _, method = METHOD[1:].partition("/")
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(handle)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


@contextlib.contextmanager
def bare_server(messages: int) -> Iterator[Side]:
    """Runs a process that serves the baseline."""
    command = [sys.executable, __file__, "--serve_bare", str(messages)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        yield Side(
            name=f"bare handler, messages: {messages}",
            address=f"127.0.0.1:{port}",
            pid=process.pid,
        )
        process.stdin.close()


@contextlib.contextmanager
def null_server(work_ms: float) -> Iterator[list[Side]]:
    """Runs a server with the null engine; yields it as called by older clients and by ours."""
    with running_server(
        *("--engine", "null_engine:create", "--model.max_num_seqs", "1024"),
        *("--fake.decode_s_per_token", str(work_ms / 1000 / COMPLETION_TOKENS)),
        command=COMMAND,
    ) as process:
        yield [
            Side(
                name=f"server, {'events batched' if batched else 'an event a message'}",
                address=process.address,
                pid=process.popen.pid,
                batched=batched,
            )
            for batched in (False, True)
        ] + [
            Side(
                name="server, many completions over one call",
                address=process.address,
                pid=process.popen.pid,
                batched=True,
                many=True,
            )
        ]


def pin(pid: int, cores: set[int]) -> None:
    """Pins all current and future threads of a process to some cores."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)


def measure(
    side: Side, *, seconds: float, work_s: float, load_cores: set[int] | None
) -> dict[str, float]:
    """Runs one round of load."""
    command = [sys.executable, str(_HERE / "generate_load.py"), side.address]
    command += ["--pid", str(side.pid), "--seconds", str(seconds)]
    command += ["--work_s", str(work_s)]
    command += ["--batched"] if side.batched else []
    command += ["--many"] if side.many else []

    def settle() -> None:
        if load_cores:
            os.sched_setaffinity(0, load_cores)

    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, preexec_fn=settle)
    result: dict[str, float] = json.loads(done.stdout)
    return result


async def engine_alone(work_ms: float, seconds: float) -> dict[str, float]:
    """Measures the engine without a server."""
    engine = NullEngine(work_ms / 1000)
    request = EngineRequest(
        request_id="r", prompt=(1,), sampling=Sampling(max_tokens=COMPLETION_TOKENS), logprobs=True
    )

    async def call(_: int) -> None:
        async for _event in engine.generate(request):
            pass

    times_s, _ = await keep_in_flight(
        call, concurrency=CONCURRENCY, seconds=seconds, work_s=work_ms / 1000
    )
    return percentiles(times_s)


def run(args: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Runs all sides in turn, round by round."""
    *others, last = sorted(os.sched_getaffinity(0))
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {"busy": {}, "paced": {}}
    with (
        bare_server(1) as one,
        bare_server(3) as three,
        null_server(0) as busy,
        null_server(args.work_ms) as paced,
    ):
        for side in (one, three, *busy):
            pin(side.pid, {last})
        for _ in range(args.rounds):
            for side in (one, three, *busy):
                result = measure(side, seconds=args.seconds, work_s=0, load_cores=set(others))
                rounds["busy"].setdefault(side.name, []).append(result)
            alone = uvloop.run(engine_alone(args.work_ms, args.seconds))
            rounds["paced"].setdefault(_ALONE, []).append(alone)
            for side in paced:
                result = measure(
                    side, seconds=args.seconds, work_s=args.work_ms / 1000, load_cores=None
                )
                rounds["paced"].setdefault(side.name, []).append(result)
    return rounds


def show(name: str, values: list[float], form: str) -> None:
    """Prints the median and range."""
    middle, low, high = (format(pick(values), form) for pick in (statistics.median, min, max))
    print(f"    {name:44} {middle:>8}  ({low} to {high})")


def main() -> None:
    """Prints the tables; writes the rounds with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of load, a side and a round")
    parser.add_argument("--work_ms", type=float, default=200.0, help="engine's time, for latency")
    parser.add_argument("--json", type=Path, help="also write the rounds here")
    parser.add_argument("--serve_bare", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_bare is not None:
        uvloop.run(serve_bare(args.serve_bare))
        return
    rounds = run(args)
    for title, key, form in (
        ("calls a second of the server's processor time", "calls_per_server_cpu_s", ",.0f"),
        ("calls a second", "calls_per_s", ",.0f"),
        ("of its core, the server was busy", "server_core_busy", ".0%"),
        ("messages a call", "messages_per_call", ".2f"),
    ):
        print(f"  64 at once, no work, server on one core: {title}")
        for name, results in rounds["busy"].items():
            show(name, [result[key] for result in results], form)
    alone = rounds["paced"][_ALONE]
    for key in ("p50_ms", "p99_ms"):
        print(f"  64 at once, {args.work_ms:g} ms of work: added {key.replace('_', ', ')}")
        for name, results in rounds["paced"].items():
            if name != _ALONE:
                pairs = zip(results, alone, strict=True)
                show(name, [result[key] - engine[key] for result, engine in pairs], ".2f")
    if args.json is not None:
        args.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
