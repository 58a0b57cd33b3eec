"""Deltas between the trainer's publisher and real servers: bit for bit the same after any fault.

Random sequences of versions, inline and by file: few or all elements change, servers are replaced,
their bases are damaged or lost, updates are begun and aborted, files of changes are damaged, cut
short, swapped for older ones or lost. After every version the fake engine's fingerprint shows that
each server holds the policy's weights. The policy's two ranks each send their own weights.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import NamedTensor, TensorSpec
from treadle.policy.config.weight_sync import (
    DeltaConfig,
    FileTransportConfig,
    InlineTransportConfig,
    WeightSyncConfig,
)
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.delta import DeltaSender
from treadle.policy.weight_sync.payload import (
    specs_response,
    tensor_bytes,
    tensor_spec_to_proto,
)
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.policy.weight_sync.transports.file import write_files
from treadle.policy.weight_sync.transports.inline import push
from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server import engine as server_engine
from treadle.rollout_server.config.schema import ServerConfig, WeightsConfig
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.engines.fake.model import fingerprint_entry, fingerprint_of
from treadle.rollout_server.server import Server
from treadle.rollout_server.testing import FakeClock, serve_in_process

RANKS = 2
SHAPES = {"a": (3, 50), "b": (400,), "c": (), "d": (0,)}
BFLOAT16 = server_engine.ElementType.BFLOAT16


class Policy:
    """Two ranks that hold the same weights and send half of them each.

    Attributes:
        spoil: What happens to the next files of changes once they are written.
    """

    def __init__(self) -> None:
        self.spoil = "none"
        self.tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.senders = [DeltaSender() for _ in range(RANKS)]

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name=name, shape=shape, element_type="float32", sender=number % RANKS)
            for number, (name, shape) in enumerate(SHAPES.items())
        )

    def export_weights(self) -> Iterator[NamedTensor]:
        for name, tensor in self.tensors.items():
            yield NamedTensor(name=name, tensor=tensor)

    async def call(self, request: Message) -> Sequence[Any]:
        answers = [
            await asyncio.to_thread(self._execute, request, rank, sender)
            for rank, sender in enumerate(self.senders)
        ]
        if isinstance(request, weights_pb.WriteFilesRequest) and request.HasField("base_version"):
            self._spoil(Path(request.directory))
        return answers

    def _execute(self, request: Message, rank: int, sender: DeltaSender) -> Any:
        match request:
            case weights_pb.GetWeightSpecsRequest():
                return specs_response(self.weight_specs())
            case weights_pb.ComputeDeltaRequest():
                return sender.compute(self, request, rank=rank)
            case weights_pb.PushRequest(delta=True):
                return sender.push(self, request, rank=rank)
            case weights_pb.PushRequest():
                return push(self, request, rank=rank)
            case weights_pb.WriteFilesRequest() if request.HasField("base_version"):
                return sender.write(self, request, rank=rank)
            case weights_pb.WriteFilesRequest():
                return write_files(self, request, rank=rank)
        raise NotImplementedError(request)

    def _spoil(self, directory: Path) -> None:
        file = directory / "rank-00000.safetensors"
        kept = directory.parent / "older"
        data = bytearray(file.read_bytes())
        match self.spoil:
            case "flip":
                data[-1] ^= 1
                file.write_bytes(data)
            case "cut":
                file.write_bytes(data[:-1])
            case "lose":
                file.unlink()
            case "swap" if kept.exists():
                shutil.copy(kept, file)
        kept.write_bytes(data)

    def fingerprint(self) -> bytes:
        """Returns the fingerprint of a fake engine that was given these weights."""
        return fingerprint_of(
            fingerprint_entry(
                server_engine.NamedTensor(
                    spec=server_engine.TensorSpec(
                        name=name, element_type=BFLOAT16, shape=SHAPES[name]
                    ),
                    data=tensor_bytes(tensor, "bfloat16"),
                )
            )
            for name, tensor in self.tensors.items()
        )


class Fleet:
    """Servers by name, each with its engine and client."""

    def __init__(self, stack: contextlib.AsyncExitStack, weights: Path) -> None:
        self._stack = stack
        self._config = ServerConfig(weights=WeightsConfig(directory=weights))
        self.members: dict[str, tuple[Server, FakeEngine, WeightSyncClient]] = {}

    async def start(self, name: str) -> None:
        model = server_engine.ModelInfo(architecture="fake", vocab_size=8, context_length=8)
        engine = FakeEngine(model=model, clock=FakeClock())
        server = await self._stack.enter_async_context(
            serve_in_process(engine, config=self._config)
        )
        client = WeightSyncClient(name, server.address, control_deadline_s=30, commit_deadline_s=30)
        self._stack.push_async_callback(client.aclose)
        self.members[name] = (server, engine, client)

    @property
    def clients(self) -> list[WeightSyncClient]:
        return [client for _, _, client in self.members.values()]

    def damage(self, name: str) -> None:
        """Flips a bit of the server's base."""
        base = self.members[name][0].replica.updates._base
        if base is not None:
            base.weights.view(0)[0] ^= 1

    async def leave_open(self, name: str, policy: Policy, version: int) -> None:
        """Begins an update without delta and aborts it, as another trainer would."""
        client = self.members[name][2]
        request = pb.BeginUpdateRequest(
            update_id="other",
            weight_version=version,
            tensors=[tensor_spec_to_proto(spec, "bfloat16") for spec in policy.weight_specs()],
        )
        request.lease.FromSeconds(60)
        request.inline.SetInParent()
        await client.begin(request)
        await client.abort("other")


@contextlib.asynccontextmanager
async def fleet(weights: Path) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        made = Fleet(stack, weights)
        for name in ("one", "two"):
            await made.start(name)
        yield made


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["none", "none", "replace", "damage", "leave_open", "flip", "cut", "swap", "lose"]
        ),
        st.sampled_from(["one", "two"]),
        st.sampled_from([0.0, 0.02, 1.0]),
        st.integers(0, 2**16),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize(
    "transport", [InlineTransportConfig(chunk_bytes=4096), FileTransportConfig()]
)
@settings(max_examples=20, deadline=None)
@given(EVENTS, st.integers(1, 4))
def test_every_server_ends_with_the_policys_bits(
    transport: InlineTransportConfig | FileTransportConfig,
    events: list[tuple[str, str, float, int]],
    full_every: int,
) -> None:
    config = WeightSyncConfig(
        transport=transport, delta=DeltaConfig(enabled=True, full_every=full_every)
    )
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_run(events, config, Path(directory)))


async def _run(
    events: list[tuple[str, str, float, int]], config: WeightSyncConfig, directory: Path
) -> None:
    policy = Policy()
    publisher = WeightPublisher(
        cast(PolicyGroup, policy), config, element_type="bfloat16", directory=directory
    )
    async with fleet(directory) as servers:
        for version, (event, name, share, seed) in enumerate(events, start=1):
            policy.spoil = event
            if event == "replace":
                await servers.start(name)
            elif event == "damage":
                servers.damage(name)
            elif event == "leave_open":
                await servers.leave_open(name, policy, version)
            generator = torch.Generator().manual_seed(seed)
            for tensor in policy.tensors.values():
                tensor += torch.rand(tensor.shape, generator=generator) < share
            report = await publisher.publish(version, servers.clients)
            assert (sorted(report.served), report.failed) == (["one", "two"], {})
            for server, engine, _ in servers.members.values():
                assert server.replica.weight_version == version
                assert engine._fingerprint == policy.fingerprint()
