"""What the server adds to a completion: Generate over loopback gRPC against the engine in process.

The engine is the fake without latency, so that all the time is ours: the same completions
run once as calls of `Engine.generate` and once as Generate calls of plain gRPC stubs, with
the server in a process of its own. The two take turns, so that a noisy machine hits both;
what is printed is the median and the range over the rounds.

    python benchmarks/generate_overhead.py [--rounds 5] [--calls 200] [--out results.json]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc.aio

from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout_server.config import ServerConfig
from treadle.rollout_server.engine import EngineRequest, Sampling
from treadle.rollout_server.engines.fake import FakeEngine, create
from treadle.rollout_server.testing import server_process, stubs_for

PROMPT_TOKENS, COMPLETION_TOKENS, CONCURRENCY = 200, 32, 16

_Call = Callable[[int], Awaitable[None]]


def in_process(engine: FakeEngine) -> _Call:
    """One completion, straight from the engine."""

    async def call(index: int) -> None:
        request = EngineRequest(
            request_id=str(index),
            prompt=_prompt(index),
            sampling=Sampling(max_tokens=COMPLETION_TOKENS, seed=index, ignore_eos=True),
            logprobs=True,
        )
        async with aclosing(engine.generate(request)) as events:
            async for _ in events:
                pass

    return call


def over_grpc(generation: Any) -> _Call:
    """The same completion, from the server."""

    async def call(index: int) -> None:
        request = pb.GenerateRequest(
            request_id=str(index),
            prompt_token_ids=_prompt(index),
            sampling=pb.SamplingParams(max_tokens=COMPLETION_TOKENS, seed=index, ignore_eos=True),
            logprob_mode=pb.LOGPROB_MODE_SAMPLED,
        )
        async for _ in generation.Generate(request, timeout=60):
            pass

    return call


def _prompt(index: int) -> tuple[int, ...]:
    return tuple((index * 7 + place) % 256 for place in range(PROMPT_TOKENS))


async def measure(call: _Call, calls: int) -> dict[str, float]:
    """Latency of calls one after another, and calls a second with many at once."""
    times_ms = []
    for index in range(calls):
        began = time.perf_counter()
        await call(index)
        times_ms.append((time.perf_counter() - began) * 1000)
    indices = iter(range(calls))

    async def worker() -> None:
        for index in indices:
            await call(index)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(worker())
    ordered = sorted(times_ms)
    return {
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, round(len(ordered) * 0.99))],
        "calls_per_s": calls / (time.perf_counter() - began),
    }


async def run(rounds: int, calls: int) -> dict[str, Any]:
    """Both sides in turn, `rounds` times, after one round to warm up."""
    engine = await create(ServerConfig())
    sides: dict[str, list[dict[str, float]]] = {"in_process": [], "grpc": []}
    async with (
        server_process("--engine", "fake") as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        callers = {
            "in_process": in_process(engine),
            "grpc": over_grpc(stubs_for(channel).generation),
        }
        for number in range(rounds + 1):
            for name, call in callers.items():
                result = await measure(call, calls)
                if number:
                    sides[name].append(result)
    return {"rounds": sides, "summary": _summary(sides)}


def _summary(sides: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    pairs = list(zip(sides["in_process"], sides["grpc"], strict=True))
    columns = {
        "in process p50 ms": [mine["p50_ms"] for mine, _ in pairs],
        "gRPC p50 ms": [theirs["p50_ms"] for _, theirs in pairs],
        "added p50 ms": [theirs["p50_ms"] - mine["p50_ms"] for mine, theirs in pairs],
        "added p99 ms": [theirs["p99_ms"] - mine["p99_ms"] for mine, theirs in pairs],
        "in process calls/s": [mine["calls_per_s"] for mine, _ in pairs],
        "gRPC calls/s": [theirs["calls_per_s"] for _, theirs in pairs],
        "ratio of calls/s": [theirs["calls_per_s"] / mine["calls_per_s"] for mine, theirs in pairs],
    }
    return {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in columns.items()
    }


def main() -> None:
    """Prints the table; writes the numbers with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments.rounds, arguments.calls))
    for name, row in result["summary"].items():
        print(f"{name:22} {row['median']:10.3f}  ({row['least']:.3f} to {row['most']:.3f})")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
