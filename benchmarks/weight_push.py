"""How fast weights come in: PushWeights over loopback gRPC against memcpy of the same bytes.

One stream of 1 MiB chunks from a sender thread with the synchronous stub, as the trainer
sends, to a server in a process of its own; the CRC-32 of each chunk is computed by both
sides. memcpy copies the same bytes between two buffers that were touched before. The two
take turns; what is printed is the median and the range over the rounds.

    python benchmarks/weight_push.py [--rounds 5] [--megabytes 256] [--out results.json]
"""

import argparse
import asyncio
import json
import statistics
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import duration_pb2

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.testing import Stubs, server_process, stubs_for

CHUNK_BYTES = 1 << 20


def memcpy_s(source: memoryview, target: memoryview) -> float:
    """Seconds of one copy."""
    began = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began


def push_s(stubs: Stubs, update_id: str, data: memoryview) -> float:
    """Seconds of one push of one tensor; Begin and Abort are not counted."""
    spec = pb.TensorSpec(name="w", element_type=pb.ELEMENT_TYPE_FLOAT32, shape=[len(data) // 4])
    begin = pb.BeginUpdateRequest(
        update_id=update_id,
        weight_version=1,
        tensors=[spec],
        lease=duration_pb2.Duration(seconds=60),
        inline=pb.InlineTransport(),
    )
    stubs.weights.BeginUpdate(begin, timeout=10)
    began = time.perf_counter()
    response = stubs.weights.PushWeights(_messages(update_id, data), timeout=300)
    took_s = time.perf_counter() - began
    assert response.received_bytes == len(data)
    stubs.weights.AbortUpdate(pb.AbortUpdateRequest(update_id=update_id), timeout=10)
    return took_s


def _messages(update_id: str, data: memoryview) -> Iterator[pb.PushWeightsRequest]:
    yield pb.PushWeightsRequest(header=pb.PushHeader(update_id=update_id))
    for offset in range(0, len(data), CHUNK_BYTES):
        part = data[offset : offset + CHUNK_BYTES]
        yield pb.PushWeightsRequest(
            chunk=pb.WeightChunk(offset=offset, crc32=zlib.crc32(part), data=bytes(part))
        )


def measure(address: str, rounds: int, num_bytes: int) -> dict[str, Any]:
    """Both sides in turn, `rounds` times, after one round to warm up."""
    source = memoryview(bytearray(range(256)) * (num_bytes // 256))
    target = memoryview(bytearray(num_bytes))
    copies, pushes = [], []
    with grpc.insecure_channel(address) as channel:
        stubs = stubs_for(channel)
        for number in range(rounds + 1):
            copied = num_bytes / memcpy_s(source, target) / 1e9
            pushed = num_bytes / push_s(stubs, f"update-{number}", source) / 1e9
            if number:
                copies.append(copied)
                pushes.append(pushed)
    ratios = [push / copy for push, copy in zip(pushes, copies, strict=True)]
    columns = {"memcpy GB/s": copies, "push GB/s": pushes, "push / memcpy": ratios}
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
        print(f"{name:14} {row['median']:8.3f}  ({row['least']:.3f} to {row['most']:.3f})")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
