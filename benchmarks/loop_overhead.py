"""What the agent loop costs when the engine costs nothing: 1,000 trajectories at a time.

One loop (`tool_agent`: render, generate, parse, call a tool, extend) with a null engine that knows
its reply before it is asked, run in three ways, in turn, over the rounds:

* in one process: the runner calls the engine as a coroutine;
* over gRPC: the same process calls a server process through `connect`, as against real servers;
* Ray, as verl runs its agent loops (`loop_ray`): over 8 worker actors, its default; each turn is a
  call of a server actor (vLLM), which with SGLang calls another. Loop, renderer, tool and replies
  are the same as above, so that what differs is Ray.

A turn is timed from one request of a trajectory to its next: with an engine that takes no time,
all of it is overhead, the wait for the other 999 included. CPU time is that of all processes that a
side uses, per turn; unlike the rest it does not depend on what else the machine does.

    python benchmarks/loop_overhead.py [--rounds 5] [--trajectories 1000] [--turns 5]
        [--workers 8] [--out results.json]
"""

import argparse
import asyncio
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from loop_ray import on_ray
from loop_subject import CALL, LAST, InProcess, Run, Script, run_loop

from treadle.agent_loop.rpc import connect
from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout.v1 import generation_service_pb2_grpc as pb_grpc
from treadle.rollout.v1 import server_service_pb2, server_service_pb2_grpc
from treadle.rollout_server.testing.descendants import descendants


class NullService(pb_grpc.GenerationServiceServicer, server_service_pb2_grpc.ServerServiceServicer):
    """The null engine behind the contract."""

    def __init__(self, turns: int) -> None:
        self._script = Script(turns)

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams the session's next completion, in groups of up to 32 as our servers do."""
        ids = self._script.ids(request.session_id)
        yield pb.GenerateResponse(started=pb.GenerateStarted())
        for start in range(0, len(ids), 32):
            group = ids[start : start + 32]
            chunk = pb.TokenChunk(token_ids=group, logprobs=[-0.5] * len(group))
            yield pb.GenerateResponse(tokens=chunk)
        finished = pb.GenerateFinished(reason=pb.FINISH_REASON_STOP, num_tokens=len(ids))
        yield pb.GenerateResponse(finished=finished)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Fits the byte renderer."""
        return server_service_pb2.GetServerInfoResponse(
            engine="null",
            capabilities=server_service_pb2.Capabilities(sampled_logprobs=True),
            model=server_service_pb2.ModelInfo(
                architecture="null", vocab_size=512, context_length=1 << 20
            ),
        )


async def serve(turns: int) -> None:
    """Serves the null engine until standard input ends."""
    server = grpc.aio.server()
    service = NullService(turns)
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server_service_pb2_grpc.add_ServerServiceServicer_to_server(  # type: ignore[no-untyped-call]
        service, server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


@asynccontextmanager
async def null_server(turns: int) -> AsyncIterator[tuple[str, int]]:
    """A server process; yields its address and its id."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--serve", "--turns", str(turns)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip(), process.pid
    finally:
        process.terminate()
        await process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to run the batch.

    Attributes:
        run: Runs the given number of trajectories.
        processes: Ids of the processes that it uses besides this one.
    """

    run: Run
    processes: Callable[[], set[int]]


def cpu_s(processes: set[int]) -> float:
    """User and system time of this process and others."""
    ticks = 0
    for process in processes:
        with suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def measure(side: Side, trajectories: int, turns: int) -> dict[str, float]:
    """One batch: trajectories a second, the turns' times, and CPU time."""
    processes = side.processes()
    cpu_before_s, began = cpu_s(processes), time.perf_counter()
    result = await side.run(trajectories)
    wall_s = time.perf_counter() - began
    sampled = (turns - 1) * len(CALL) + len(LAST)
    assert len(result.samples) == trajectories
    assert all(mask.count(True) == sampled for _, mask in result.samples)
    ordered = sorted(result.turns_s)
    return {
        "trajectories_per_s": trajectories / wall_s,
        "turn_p50_ms": statistics.median(ordered) * 1000,
        "turn_p99_ms": ordered[math.ceil(0.99 * len(ordered)) - 1] * 1000,
        "cpu_ms_per_turn": (cpu_s(processes) - cpu_before_s) / trajectories / turns * 1000,
    }


async def run_all(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Every side in turn, after one round to warm up."""
    turns = arguments.turns
    rows: dict[str, list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        address, server = await stack.enter_async_context(null_server(turns))
        over_grpc = await stack.enter_async_context(connect([address]))
        sides = {
            "in one process": Side(
                run=lambda count: run_loop(InProcess(turns), range(count)), processes=set
            ),
            "over gRPC": Side(
                run=lambda count: run_loop(over_grpc, range(count)), processes=lambda: {server}
            ),
        }
        for workers in arguments.workers:
            for engine, forwarding in (("vLLM", False), ("SGLang", True)):
                sides[f"Ray, {engine}, {workers} workers"] = Side(
                    run=on_ray(workers, turns, forwarding=forwarding),
                    processes=lambda: descendants(os.getpid()) - {server},
                )
        for number in range(arguments.rounds + 1):
            for name, side in sides.items():
                result = await measure(side, arguments.trajectories, turns)
                if number:
                    rows.setdefault(name, []).append(result)
    return rows


def print_table(rows: dict[str, list[dict[str, float]]]) -> None:
    """Medians over the rounds; ratios to our one process with their range."""
    ours = rows["in one process"]
    print(f"{'':24} {'trajectories/s':>22} {'ratio':>20} {'p50':>6} {'p99':>6}", end="")
    print(f" {'CPU ms/turn':>20} {'ratio':>20}")
    for name, results in rows.items():
        columns = {
            key: [result[key] for result in results]
            for key in ("trajectories_per_s", "turn_p50_ms", "turn_p99_ms", "cpu_ms_per_turn")
        }
        slower = [
            mine["trajectories_per_s"] / theirs["trajectories_per_s"]
            for mine, theirs in zip(ours, results, strict=True)
        ]
        dearer = [
            theirs["cpu_ms_per_turn"] / mine["cpu_ms_per_turn"]
            for mine, theirs in zip(ours, results, strict=True)
        ]
        print(
            f"{name:24} {_spread(columns['trajectories_per_s'], 0):>22} {_spread(slower, 1):>20} "
            f"{statistics.median(columns['turn_p50_ms']):6.0f} "
            f"{statistics.median(columns['turn_p99_ms']):6.0f} "
            f"{_spread(columns['cpu_ms_per_turn'], 2):>20} {_spread(dearer, 1):>20}"
        )


def _spread(values: Sequence[float], digits: int) -> str:
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


def main() -> None:
    """Prints the table; writes the numbers with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[8])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.turns))
        return
    if arguments.workers:
        import ray

        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rows = asyncio.run(run_all(arguments))
    print_table(rows)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
