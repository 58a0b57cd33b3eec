"""How fast weights come in: PushWeights over loopback gRPC against memcpy of the same bytes.

One stream of 1 MiB chunks, made as the trainer makes them, to a server in a process of its
own; the CRC-32 of each chunk is computed by both sides. memcpy copies the same bytes between
two buffers that were touched before. The two take turns; what is printed is the median and
the range over the rounds. The CPU time is the sender's, in all its threads, which other
processes disturb less.

    python benchmarks/weight_push.py [--rounds 5] [--megabytes 256] [--out results.json]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf import duration_pb2

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.testing import server_process, stubs_for
from treadle.trainer.weight_sync.payload import chunk_message, slices

CHUNK_BYTES = 1 << 20
PUSH_WEIGHTS = "/treadle.rollout.v1.WeightSyncService/PushWeights"


class Cost(NamedTuple):
    """Of one push."""

    wall_s: float
    sender_cpu_s: float


def memcpy_s(source: memoryview, target: memoryview) -> float:
    """Seconds of one copy."""
    began = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began


def push(channel: grpc.Channel, update_id: str, data: memoryview) -> Cost:
    """Pushes one tensor; Begin and Abort are not counted."""
    weights = stubs_for(channel).weights
    call: grpc.StreamUnaryMultiCallable[bytes, pb.PushWeightsResponse]
    call = channel.stream_unary(
        PUSH_WEIGHTS, response_deserializer=pb.PushWeightsResponse.FromString
    )
    spec = pb.TensorSpec(name="w", element_type=pb.ELEMENT_TYPE_FLOAT32, shape=[len(data) // 4])
    begin = pb.BeginUpdateRequest(
        update_id=update_id,
        weight_version=1,
        tensors=[spec],
        lease=duration_pb2.Duration(seconds=60),
        inline=pb.InlineTransport(),
    )
    weights.BeginUpdate(begin, timeout=10)
    began, cpu_began = time.perf_counter(), time.process_time()
    response = call(_messages(update_id, data), timeout=300)
    cost = Cost(time.perf_counter() - began, time.process_time() - cpu_began)
    assert response.received_bytes == len(data)
    weights.AbortUpdate(pb.AbortUpdateRequest(update_id=update_id), timeout=10)
    return cost


def _messages(update_id: str, data: memoryview) -> Iterator[bytes]:
    header = pb.PushWeightsRequest(header=pb.PushHeader(update_id=update_id))
    yield header.SerializeToString()
    for offset, part in slices(data, CHUNK_BYTES):
        yield chunk_message(0, offset, part)


def measure(address: str, rounds: int, num_bytes: int) -> dict[str, Any]:
    """Both sides in turn, `rounds` times, after one round to warm up."""
    source = memoryview(bytearray(range(256)) * (num_bytes // 256))
    target = memoryview(bytearray(num_bytes))
    copies, pushes, cpu = [], [], []
    with grpc.insecure_channel(address) as channel:
        for number in range(rounds + 1):
            copied = num_bytes / memcpy_s(source, target) / 1e9
            cost = push(channel, f"update-{number}", source)
            if number:
                copies.append(copied)
                pushes.append(num_bytes / cost.wall_s / 1e9)
                cpu.append(cost.sender_cpu_s / num_bytes * 1e9)
    ratios = [push / copy for push, copy in zip(pushes, copies, strict=True)]
    columns = {
        "memcpy GB/s": copies,
        "push GB/s": pushes,
        "push / memcpy": ratios,
        "sender CPU s/GB": cpu,
    }
    summary = {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in columns.items()
    }
    return {"bytes": num_bytes, "rounds": columns, "summary": summary}


async def run(rounds: int, num_bytes: int) -> dict[str, Any]:
    """Starts the server and measures in a thread."""
    async with server_process("--engine", "fake") as address:
        return await asyncio.to_thread(measure, address, rounds, num_bytes)


def main() -> None:
    """Prints the table; writes the numbers with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments.rounds, arguments.megabytes << 20))
    for name, row in result["summary"].items():
        print(f"{name:16} {row['median']:8.3f}  ({row['least']:.3f} to {row['most']:.3f})")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
