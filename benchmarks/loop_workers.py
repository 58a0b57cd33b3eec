"""Loop workers: what a turn costs the driver, a worker and the router; what 10,000 in flight do.

Workers, router, driver's end, gRPC, chat template, parser and tool are real. The server is
elsewhere, as far as that can be on one machine: a process that replies at once with prepared
tokens, whose CPU time is measured and left out. The figure is CPU time, since the machine's other
work is not ours: with N workers on a core each, a trajectory takes no less than the
most of (worker / N, driver, router), so 2 workers carry

    worker / max(worker / 2, driver, router)

times what 1 does. Beside it stands the rate by the clock, for what the machine did meanwhile. With
`--in_flight` as many tasks wait at the server until all of them are there, and the driver's memory
is that of holding them::

    python benchmarks/loop_workers.py [--rounds 3] [--trajectories 500] [--turns 5]
        [--in_flight 10000]
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from treadle.agent_loop import AgentTask, Message, SamplingParams, Trajectory
from treadle.agent_loop.rpc import Requirements
from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout.v1 import generation_service_pb2_grpc as pb_grpc
from treadle.rollout.v1 import server_service_pb2, server_service_pb2_grpc
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.data.load_data import load_renderer
from treadle.trainer.demo import DEMO
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.rollout.make_runner import RunnerSettings
from treadle.trainer.rollout.workers.pool import LoopWorkers, loop_workers

_TICKS = os.sysconf("SC_CLK_TCK")
_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 + 25"}}\n</tool_call>'


@dataclass(frozen=True)
class Address:
    """Where the server is."""

    address: str


class Service(pb_grpc.GenerationServiceServicer, server_service_pb2_grpc.ServerServiceServicer):
    """Replies at once; holds the first requests until `gate` of them are there.

    Args:
        call: Ids of a turn that calls the tool.
        last: Ids of the last turn.
        turns: Turns of a session.
        gate: Number of requests to wait for.
    """

    def __init__(self, call: Sequence[int], last: Sequence[int], turns: int, gate: int) -> None:
        self._call, self._last, self._turns = tuple(call), tuple(last), turns
        self._calls: Counter[str] = Counter()
        self._missing, self._open = gate, asyncio.Event()

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams the session's next turn."""
        self._missing -= 1
        if self._missing > 0:
            await self._open.wait()
        self._open.set()
        self._calls[request.session_id] += 1
        is_last = self._calls[request.session_id] >= self._turns
        ids = self._last if is_last else self._call
        if is_last:
            del self._calls[request.session_id]
        yield pb.GenerateResponse(started=pb.GenerateStarted())
        chunk = pb.TokenChunk(token_ids=ids, logprobs=[-0.5] * len(ids))
        yield pb.GenerateResponse(tokens=chunk)
        finished = pb.GenerateFinished(reason=pb.FINISH_REASON_STOP, num_tokens=len(ids))
        yield pb.GenerateResponse(finished=finished)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Fits what the workers ask for."""
        return server_service_pb2.GetServerInfoResponse(
            engine="null",
            capabilities=server_service_pb2.Capabilities(sampled_logprobs=True),
            model=server_service_pb2.ModelInfo(
                architecture="null", vocab_size=4096, context_length=1 << 20
            ),
        )


async def serve(turns: int, gate: int) -> None:
    """Serves until standard input ends."""
    renderer = load_renderer(_config(0, turns))
    end = renderer.stop_token_ids[0]
    call, last = ((*renderer.encode(text), end) for text in (_CALL, "#### 42"))
    server = grpc.aio.server()
    service = Service(call, last, turns, gate)
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
async def null_server(turns: int, gate: int) -> AsyncIterator[Address]:
    """A server process; yields where it is."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--serve", "--turns", str(turns), "--in_flight", str(gate)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield Address((await process.stdout.readline()).decode().strip())
    finally:
        process.terminate()
        await process.wait()


def _config(workers: int, turns: int) -> Config:
    return load_config(
        [DEMO],
        [
            f"agent.num_workers={workers}",
            f"agent.max_assistant_turns={turns}",
            "rollout.response_length=4096",
        ],
    ).config


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _pids(logs: Path, name: str) -> list[int]:
    return [int(json.loads(path.read_text())["pid"]) for path in logs.glob(f"{name}*.ready")]


def _task(number: int) -> AgentTask:
    return AgentTask(
        task_id=f"train/{number}",
        sample_index=number,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="What is 17 + 25?"),),
        fields={
            "data_source": "treadle/calculator",
            "reward_model": {"style": "rule", "ground_truth": "42"},
        },
        seed=number,
    )


async def run(workers: LoopWorkers, trajectories: int, in_flight: int) -> float:
    """Runs tasks; returns the driver's memory in MiB when the first of them has ended."""
    held_mib = 0.0
    num_ended = 0

    async def sink(trajectory: Trajectory) -> None:
        nonlocal num_ended, held_mib
        assert trajectory.error is None, trajectory.error
        assert trajectory.reward == 1.0
        num_ended += 1
        if num_ended == 1:
            held_mib = _rss_mib()

    settings = RunnerSettings(
        sampling=SamplingParams(max_tokens=256, temperature=1.0), min_weight_version=0
    )
    runner = workers.runner(settings, max_in_flight=in_flight)
    await runner.run((_task(number) for number in range(trajectories)), sink)
    assert num_ended == trajectories
    return held_mib


async def measure(count: int, trajectories: int, turns: int, in_flight: int) -> dict[str, float]:
    """Returns CPU milliseconds of a turn by process, and trajectories a second by the clock."""
    config = _config(count, turns)
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory)
        gate = in_flight if in_flight == trajectories else 0
        async with (
            LocalLauncher(logs) as launcher,
            null_server(turns, gate) as server,
            loop_workers(
                launcher,
                config,
                servers=[server],
                requirements=Requirements(),
                loops=frozenset({"tool_agent"}),
                images=False,
            ) as (workers, _),
        ):
            if not gate:
                await run(workers, 50 * count, in_flight)  # imports, caches
            pids = {name: _pids(logs, name) for name in ("worker", "router")}

            def cpu() -> dict[str, float]:
                used = {name: sum(map(_cpu_s, of)) for name, of in pids.items()}
                return {**used, "driver": time.process_time()}

            memory, before, began = _rss_mib(), cpu(), time.perf_counter()
            peak = await run(workers, trajectories, in_flight)
            wall_s, after = time.perf_counter() - began, cpu()
    num_turns = trajectories * turns
    return {
        **{name: 1000 * (after[name] - before[name]) / num_turns for name in before},
        "rate": trajectories / wall_s,
        "driver_mib": peak - memory,
    }


async def main() -> None:
    """Measures 1 and 2 workers in turn, or one run with as many in flight as asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trajectories", type=int, default=500)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--in_flight", type=int, default=0)
    args = parser.parse_args()
    if args.serve:
        await serve(args.turns, args.in_flight)
        return
    if args.in_flight:
        found = await measure(2, args.in_flight, args.turns, args.in_flight)
        each = 1024 * found["driver_mib"] / args.in_flight
        print(
            f"{args.in_flight} in flight: driver {found['driver_mib']:.0f} MiB more, {each:.1f} "
            f"KiB each; {found['driver']:.3f} ms CPU a turn in the driver, {found['rate']:.0f}/s"
        )
        return
    for count in (1, 2) * args.rounds:
        found = await measure(count, args.trajectories, args.turns, 200)
        worker = found["worker"]
        gain = worker / max(worker / 2, found["driver"], found["router"])
        print(
            f"{count} workers: ms CPU a turn: worker {worker:.3f}, router {found['router']:.3f}, "
            f"driver {found['driver']:.3f}; {found['rate']:.0f} trajectories/s by the clock; "
            f"2 workers carry {gain:.2f} times what 1 does",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
