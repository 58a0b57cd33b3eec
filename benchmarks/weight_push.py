"""Measures how fast a weight version reaches a server of the same host, and the memory it takes.

One rank (this process) publishes the weights of a model in float32 to one server in another
process, as the trainer does, from Begin to the answer to Commit: by every transport, staged and in
place, into the torch engine and into one that ignores the weights (`null_engine.py`). In every
round each way publishes once, between two rounds of memcpy: torch's `copy_` of the same weights,
tensor by tensor, in one thread, into memory that was touched before. Printed are the median and the
range over the rounds, after one round of warm-up.

Memory is measured in separate publications, which are not timed: the anonymous memory of both
processes plus every memfd that they have open, counted once; the peak less the value before. The
rank's buckets stay from update to update and are counted where they are first used, in place.
Staging holds a copy of all weights until Commit. Files of the file transport lie in /dev/shm and
are not counted.

    python benchmarks/weight_push.py [--megabytes 256 1024] [--rounds 5] [--out results.json]
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from google.protobuf.message import Message
from null_engine import COMMAND
from transformers import AutoModelForCausalLM, Qwen2Config

from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import NamedTensor, TensorSpec
from treadle.policy.config.weight_sync import SharedMemoryTransportConfig, WeightSyncConfig
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.payload import specs_response
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.policy.weight_sync.transports.collective import CollectiveSender
from treadle.policy.weight_sync.transports.file import write_files
from treadle.policy.weight_sync.transports.inline import push
from treadle.policy.weight_sync.transports.shared_memory import NUM_SLOTS, SharedMemorySender
from treadle.rollout_server.testing import running_server

WAYS = tuple(
    (kind, in_place) for kind in ("inline", "file", "shared_memory") for in_place in (True, False)
)
_TRANSPORTS = {"collective": {"kind": "collective", "bucket_bytes": 32 << 20}}
TAKES_COLLECTIVE = "torch"
"""The engine that can join a group; over gloo, and always in place."""
BYTES_PER_LAYER = 4 * (4 * 768 * 768 + 3 * 768 * 2048)
VOCAB_SIZE = 8192


class Rank:
    """A policy of one rank that has only weights; also stands for the group of ranks."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.largest = max(tensor.nbytes for tensor in tensors.values())
        self._sender = SharedMemorySender()
        cpu = torch.device("cpu")
        self._collective = CollectiveSender(rank=0, host="127.0.0.1", device=cpu)

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """See `PolicyBackend`."""
        return tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), element_type="float32", sender=0)
            for name, tensor in self.tensors.items()
        )

    def export_weights(self) -> Iterator[NamedTensor]:
        """See `PolicyBackend`."""
        for name, tensor in self.tensors.items():
            yield NamedTensor(name=name, tensor=tensor)

    async def call(self, request: Message) -> Sequence[Any]:
        """See `PolicyGroup.call`; does what `PolicyRank.execute` does."""
        match request:
            case weights_pb.GetWeightSpecsRequest():
                return [specs_response(self.weight_specs())]
            case weights_pb.PushRequest():
                return [await asyncio.to_thread(push, self, request, rank=0)]
            case weights_pb.WriteFilesRequest():
                return [await asyncio.to_thread(write_files, self, request, rank=0)]
            case weights_pb.PushSharedMemoryRequest():
                return [await asyncio.to_thread(self._sender.push, self, request, rank=0)]
            case weights_pb.OpenGroupRequest():
                return [self._collective.open_group(request)]
            case weights_pb.BroadcastRequest():
                return [await asyncio.to_thread(self._collective.broadcast, self, request)]
        raise NotImplementedError(request)


@dataclass(slots=True)
class Results:
    """Seconds per round, and memory, by the name of what was measured."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """Adds a round."""
        self.seconds.setdefault(name, []).append(seconds)


def write_model(directory: Path, num_bytes: int) -> dict[str, torch.Tensor]:
    """Writes a model of about `num_bytes` and returns its weights, a tied head once."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=max(1, round((num_bytes - 4 * VOCAB_SIZE * 768) / BYTES_PER_LAYER)),
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=True,
    )
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    model.save_pretrained(directory)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def memory_bytes(pids: Sequence[int]) -> int:
    """Returns the memory of processes together, counting shared memory once."""
    total = 0
    shared: dict[int, int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) << 10
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(fd).startswith("/memfd:"):
                    file = fd.stat()
                    shared[file.st_ino] = file.st_blocks * 512
    return total + sum(shared.values())


@contextlib.contextmanager
def watching(pids: Sequence[int], into: list[int]) -> Iterator[None]:
    """Records the memory of processes as often as it can be read."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            into.append(memory_bytes(pids))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def memcpy_s(rank: Rank, target: Mapping[str, torch.Tensor]) -> float:
    """Returns the seconds of one copy of all weights."""
    began = time.perf_counter()
    for name, tensor in rank.tensors.items():
        target[name].copy_(tensor)
    return time.perf_counter() - began


class Ways:
    """All ways to send weights to one server."""

    def __init__(
        self,
        rank: Rank,
        client: WeightSyncClient,
        pid: int,
        weights: Path,
        *,
        collective: bool,
    ) -> None:
        self._rank = rank
        self._client = client
        self._pids = (os.getpid(), pid)
        self._version = 0
        self._publishers = {
            f"{kind}{' in place' if in_place else ''}": WeightPublisher(
                cast(PolicyGroup, rank),
                WeightSyncConfig.model_validate(
                    {"transport": _TRANSPORTS.get(kind, kind), "in_place": in_place}
                ),
                element_type="float32",
                directory=weights,
            )
            for kind, in_place in WAYS + ((("collective", True),) if collective else ())
        }

    async def measure_memory(self, results: Results) -> None:
        """Publishes once each way and records memory, once the engine has its own weights."""
        await self._publish(self._publishers["inline in place"])
        for name, publisher in self._publishers.items():
            before, seen = memory_bytes(self._pids), list[int]()
            with watching(self._pids, seen):
                await self._publish(publisher)
            results.memory[name] = max(seen) - before

    async def measure(self, results: Results) -> None:
        """Publishes once each way and records the time."""
        for name, publisher in self._publishers.items():
            results.add(name, await self._publish(publisher))

    async def _publish(self, publisher: WeightPublisher) -> float:
        self._version += 1
        report = await publisher.publish(self._version, [self._client])
        assert not report.failed, report.failed
        return report.time_s


async def run(engine: str, model: Path, rank: Rank, rounds: int) -> Results:
    """Measures all ways into one engine."""
    results = Results()
    target = {name: torch.empty_like(tensor).zero_() for name, tensor in rank.tensors.items()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as weights:
        arguments: tuple[str, ...] = ("--engine", engine, "--weights.directory", weights)
        if engine == "torch":
            arguments += ("--model.path", str(model), "--model.num_threads", "1")
        with running_server(*arguments, command=COMMAND) as process:
            client = WeightSyncClient(
                "server", process.address, control_deadline_s=10, commit_deadline_s=120
            )
            ways = Ways(
                rank,
                client,
                process.popen.pid,
                Path(weights),
                collective=engine == TAKES_COLLECTIVE,
            )
            await ways.measure_memory(results)
            for number in range(rounds + 1):
                timed = results if number else Results()
                timed.add("memcpy", memcpy_s(rank, target))
                await ways.measure(timed)
            await client.aclose()
    return results


def summarize(engine: str, rank: Rank, results: Results) -> dict[str, Any]:
    """Prints the table of one engine and one size; returns its numbers."""
    copies = results.seconds["memcpy"]
    bucket = SharedMemoryTransportConfig().bucket_bytes
    print(f"\n{engine}, {rank.num_bytes / 1e9:.2f} GB, largest weight {rank.largest / 1e6:.0f} MB")
    print(f"{'':24}{'GB/s':>7} {'(range)':>15}{'/ memcpy':>10} {'(range)':>15}  extra memory")
    rows: dict[str, Any] = {}
    for name, seconds in results.seconds.items():
        speeds = [rank.num_bytes / s / 1e9 for s in seconds]
        ratios = [copy / s for copy, s in zip(copies, seconds, strict=True)]
        extra = results.memory.get(name)
        rows[name] = {"GB/s": speeds, "ratio": ratios, "extra_bytes": extra}
        memory = ""
        if extra is not None:
            memory = f"{extra / 1e6:6.0f} MB = {extra / bucket:.1f} buckets"
            memory += f" = {extra / rank.num_bytes:.2f} copies"
        print(
            f"{name:24}{statistics.median(speeds):7.2f} {_range(speeds):>15}"
            f"{statistics.median(ratios):10.2f} {_range(ratios):>15}  {memory}"
        )
    return {"bytes": rank.num_bytes, "bucket_bytes": bucket, "slots": NUM_SLOTS, "ways": rows}


def _range(values: Sequence[float]) -> str:
    return f"({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Prints a table for each engine and size; writes the numbers with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for megabytes in arguments.megabytes:
        with tempfile.TemporaryDirectory() as model:
            tensors = write_model(Path(model), megabytes << 20)
            for engine in ("null_engine:create", "torch"):
                rank = Rank(tensors)  # with no buckets yet
                results = asyncio.run(run(engine, Path(model), rank, arguments.rounds))
                found[f"{engine} {megabytes}"] = summarize(engine, rank, results)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
