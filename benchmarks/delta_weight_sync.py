"""Measures what sending only the changed elements saves and costs, against sending all of them.

One rank (this process) publishes weights, inline or by file, to one server in another process whose
engine ignores the weights (`null_engine.py`). In every round a share of the elements, chosen
uniformly at random, changes, and the version is sent twice: as a delta, and whole by a publisher
that keeps nothing. Printed are medians and ranges over the rounds, after one round of warm-up: the
ratio of bytes, the seconds of either, and the parts of the delta's time: to compare and encode (all
weights are read), to push, or to write the files and have the server read them, and to commit, in
which the server applies and checks it. Files lie in --directory, by default in /dev/shm, so that a
slower file system does not count.

    python benchmarks/delta_weight_sync.py [--megabytes 256] [--share 0.02] [--rounds 5]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from google.protobuf.message import Message
from null_engine import COMMAND

from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.methods import verb
from treadle.policy.client.types import ElementType, NamedTensor, TensorSpec
from treadle.policy.config.weight_sync import DeltaConfig, WeightSyncConfig
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.delta import DeltaSender
from treadle.policy.weight_sync.payload import specs_response
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.policy.weight_sync.transports.file import write_files
from treadle.policy.weight_sync.transports.inline import push
from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.testing import running_server

ROWS, COLUMNS = 2048, 2048


class Rank:
    """A policy of one rank that times its commands."""

    def __init__(self, num_tensors: int, element_type: ElementType) -> None:
        dtype = getattr(torch, element_type)
        self.tensors = {
            f"layers.{number}.weight": torch.randn(ROWS, COLUMNS).to(dtype)
            for number in range(num_tensors)
        }
        self.seconds: dict[str, float] = {}
        self._delta = DeltaSender()

    def change(self, share: float) -> None:
        """Changes this share of the elements."""
        for tensor in self.tensors.values():
            chosen = torch.rand(tensor.shape) < share
            tensor[chosen] = torch.randn(int(chosen.sum())).to(tensor.dtype)

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
        began = time.perf_counter()
        answer = await asyncio.to_thread(self._execute, request)
        self.seconds[verb(request).lower()] = time.perf_counter() - began
        return [answer]

    def _execute(self, request: Message) -> Any:
        match request:
            case weights_pb.GetWeightSpecsRequest():
                return specs_response(self.weight_specs())
            case weights_pb.ComputeDeltaRequest():
                return self._delta.compute(self, request, rank=0)
            case weights_pb.PushRequest(delta=True):
                return self._delta.push(self, request, rank=0)
            case weights_pb.PushRequest():
                return push(self, request, rank=0)
            case weights_pb.WriteFilesRequest() if request.HasField("base_version"):
                return self._delta.write(self, request, rank=0)
            case weights_pb.WriteFilesRequest():
                return write_files(self, request, rank=0)
        raise NotImplementedError(request)


class TimedClient(WeightSyncClient):
    """Times the last call of each method."""

    begin_s = commit_s = 0.0

    async def begin(self, request: pb.BeginUpdateRequest) -> pb.BeginUpdateResponse:
        """See `WeightSyncClient`."""
        began = time.perf_counter()
        response = await super().begin(request)
        self.begin_s = time.perf_counter() - began
        return response

    async def commit(self, update_id: str, in_flight: pb.InFlightPolicy) -> int:
        """See `WeightSyncClient`."""
        began = time.perf_counter()
        version = await super().commit(update_id, in_flight)
        self.commit_s = time.perf_counter() - began
        return version


class Ways:
    """By delta and whole, each into its own server.

    Args:
        rank: Has the weights.
        transport: "inline" or "file".
        directory: Of the files.
        addresses: Of the servers.
    """

    def __init__(
        self,
        rank: Rank,
        transport: str,
        element_type: ElementType,
        directory: Path,
        addresses: Sequence[str],
    ) -> None:
        self._rank = rank
        self._transport = transport
        self.clients = [
            TimedClient("server", address, control_deadline_s=10, commit_deadline_s=120)
            for address in addresses
        ]
        self.by_delta, self._whole = (
            WeightPublisher(
                cast(PolicyGroup, rank),
                WeightSyncConfig.model_validate(
                    {"transport": transport, "delta": DeltaConfig(enabled=delta, full_every=10**6)}
                ),
                element_type=element_type,
                directory=directory,
            )
            for delta in (True, False)
        )

    async def measure(self, version: int) -> dict[str, float]:
        """Publishes one version both ways; returns seconds and ratios."""
        changes = await self.by_delta.publish(version, self.clients[:1])
        parts = dict(self._rank.seconds)
        kept = self.clients[0]
        whole = await self._whole.publish(version, self.clients[1:])
        found = {
            "bytes, delta / whole": changes.sent_bytes / whole.sent_bytes,
            "seconds, whole": whole.time_s,
            "seconds, delta": changes.time_s,
            "  compare and encode": parts["computedelta"],
        }
        if self._transport == "file":
            found |= {"  write": parts["writefiles"], "  begin: read": kept.begin_s}
        else:
            found["  push"] = parts["push"]
        return found | {
            "  apply, check, commit": kept.commit_s,
            "time, delta / whole": changes.time_s / whole.time_s,
        }


async def measure(
    rank: Rank,
    transport: str,
    element_type: ElementType,
    directory: Path,
    share: float,
    rounds: int,
) -> list[dict[str, float]]:
    """Returns seconds and ratios per round."""
    engine = ("--engine", "null_engine:create", "--weights.directory", str(directory))
    with (
        running_server(*engine, command=COMMAND) as kept,
        running_server(*engine, command=COMMAND) as whole,
    ):
        addresses = (kept.address, whole.address)
        ways = Ways(rank, transport, element_type, directory, addresses)
        await ways.by_delta.publish(1, ways.clients[:1])
        found = []
        for number in range(rounds + 1):
            rank.change(share)
            found.append(await ways.measure(number + 2))
        for client in ways.clients:
            await client.aclose()
    return found[1:]


def main() -> None:
    """Prints a table for each element type and transport."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    element_types: tuple[ElementType, ...] = ("bfloat16", "float32")
    for element_type in element_types:
        size = 2 if element_type == "bfloat16" else 4
        num_tensors = max(1, (arguments.megabytes << 20) // (size * ROWS * COLUMNS))
        for transport in ("inline", "file"):
            rank = Rank(num_tensors, element_type)
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                found = asyncio.run(
                    measure(
                        rank,
                        transport,
                        element_type,
                        Path(directory),
                        arguments.share,
                        arguments.rounds,
                    )
                )
            print(
                f"\n{transport}, {arguments.megabytes} MiB of {element_type}, "
                f"{arguments.share:.1%} changed"
            )
            for name in found[0]:
                values = [row[name] for row in found]
                print(
                    f"{name:26}{statistics.median(values):8.3f} "
                    f"({min(values):.3f} to {max(values):.3f})"
                )


if __name__ == "__main__":
    main()
