"""Load generator: completions with prebuilt requests, whose answers are counted.

A call of Generate costs as little as Python's gRPC allows, so that one core of load saturates one
core of the server; its answer is not decoded. With `--many` completions share calls, as those of
our client do. `generate_overhead` starts this as a separate process and reads its line of JSON.

    python benchmarks/generate_load.py ADDRESS [--concurrency 64] [--seconds 3] [--many]
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import uvloop

from treadle.rollout.v1 import generation_service_pb2 as pb

METHOD = "/treadle.rollout.v1.GenerationService/Generate"
_MANY = "/treadle.rollout.v1.GenerationService/GenerateMany"
PROMPT_TOKENS, COMPLETION_TOKENS = 200, 32
CONCURRENCY = 64
_WARM_UP_S = 0.5


def request_bytes(*, batched: bool) -> bytes:
    """Returns a request with 200 prompt tokens for 32 sampled tokens."""
    return pb.GenerateRequest(
        request_id="0123456789abcdef",
        session_id="trajectory-17",
        prompt_token_ids=[place % 256 for place in range(PROMPT_TOKENS)],
        sampling=pb.SamplingParams(max_tokens=COMPLETION_TOKENS, temperature=1.0, seed=5),
        logprob_mode=pb.LOGPROB_MODE_SAMPLED,
        batched=batched,
    ).SerializeToString()


class Many:
    """Completions over one call; what is begun together goes together.

    Args:
        channel: To the server.
        request: Of each completion.
    """

    def __init__(self, channel: grpc.aio.Channel, request: bytes) -> None:
        self._call: Any = channel.stream_stream(
            _MANY, pb.GenerateManyRequest.SerializeToString, pb.GenerateManyResponse.FromString
        )(timeout=600)
        self._begun = pb.NumberedRequest(request=pb.GenerateRequest.FromString(request))
        self._begun.timeout.FromSeconds(60)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next: list[int] = []
        self._any = asyncio.Event()
        self._number = 0
        self.messages = 0
        self._tasks = {asyncio.create_task(each) for each in (self._write(), self._read())}

    async def complete(self) -> None:
        """Makes one completion."""
        self._number += 1
        self._waiting[self._number] = ended = asyncio.get_running_loop().create_future()
        self._next.append(self._number)
        self._any.set()
        await ended

    async def aclose(self) -> None:
        """Ends the call."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()

    async def _write(self) -> None:
        while True:
            await self._any.wait()
            self._any.clear()
            message = pb.GenerateManyRequest()
            for number in self._next:
                self._begun.number = number
                message.begin.append(self._begun)
            self._next = []
            await self._call.write(message)

    async def _read(self) -> None:
        async for message in self._call:
            self.messages += 1
            for part in message.parts:
                if part.HasField("status"):
                    assert not part.status.code, part.status
                    self._waiting.pop(part.number).set_result(None)


async def keep_in_flight(
    call: Callable[[int], Awaitable[None]], *, concurrency: int, seconds: float, work_s: float
) -> tuple[list[float], float]:
    """Keeps the given number of calls in flight; returns the seconds of each and of all."""
    times_s: list[float] = []
    start = time.perf_counter()

    async def caller(index: int) -> None:
        # Spread arrivals over the engine's time, or all calls start and end together.
        await asyncio.sleep(work_s * index / concurrency)
        while (began := time.perf_counter()) < start + seconds:
            await call(index)
            times_s.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as group:
        for index in range(concurrency):
            group.create_task(caller(index))
    return times_s, time.perf_counter() - start


def percentiles(times_s: list[float]) -> dict[str, float]:
    """Returns percentiles in milliseconds."""
    ordered = sorted(times_s)
    return {
        "p50_ms": ordered[len(ordered) // 2] * 1000,
        "p99_ms": ordered[len(ordered) * 99 // 100] * 1000,
    }


async def load(args: argparse.Namespace) -> dict[str, float]:
    """Loads a server; returns call rates and latencies."""
    request = request_bytes(batched=args.batched)
    messages = 0
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(_channel(args.address)) for _ in range(args.channels)
        ]
        methods: list[Any] = [channel.unary_stream(METHOD) for channel in channels]
        shared = [Many(channel, request) for channel in channels if args.many]
        for each in shared:
            stack.push_async_callback(each.aclose)

        async def call(index: int) -> None:
            nonlocal messages
            if shared:
                await shared[index % len(shared)].complete()
                return
            async for _ in methods[index % len(methods)](request, timeout=60):
                messages += 1

        shape = {"concurrency": args.concurrency, "work_s": args.work_s}
        await keep_in_flight(call, seconds=_WARM_UP_S, **shape)
        messages = -sum(each.messages for each in shared)
        server_s = cpu_s(args.pid)
        times_s, wall_s = await keep_in_flight(call, seconds=args.seconds, **shape)
        server_s = cpu_s(args.pid) - server_s
        messages += sum(each.messages for each in shared)
    return percentiles(times_s) | {
        "calls_per_s": len(times_s) / wall_s,
        "calls_per_server_cpu_s": len(times_s) / server_s,
        "server_core_busy": server_s / wall_s,
        "messages_per_call": messages / len(times_s),
    }


def _channel(address: str) -> grpc.aio.Channel:
    # A separate connection, as if from a separate client process.
    return grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))


def cpu_s(pid: int) -> float:
    """Returns the CPU time of all threads of a process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--batched", action="store_true", help="take events in one message")
    parser.add_argument("--many", action="store_true", help="many completions over one call")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--work_s", type=float, default=0.0, help="that the engine takes")
    print(json.dumps(uvloop.run(load(parser.parse_args()))))


if __name__ == "__main__":
    main()
