"""Weights over TLS and with a token to a real server, by the transports that use gRPC."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from google.protobuf.message import Message

from treadle.agent_loop.run_certificate import SERVER_NAME
from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import NamedTensor, TensorSpec
from treadle.policy.config.weight_sync import WeightSyncConfig
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import WeightSyncError
from treadle.policy.weight_sync.payload import specs_response
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.policy.weight_sync.transports.inline import push
from treadle.policy.weight_sync.transports.shared_memory import SharedMemorySender
from treadle.rollout_server.testing import ServerProcess, running_server
from treadle.trainer.launch.run_tls import run_tls, write_private


class Rank:
    """Has one weight; stands for the ranks and for their group."""

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="w", shape=(1000,), element_type="float32", sender=0),)

    def export_weights(self) -> Iterator[NamedTensor]:
        yield NamedTensor(name="w", tensor=torch.ones(1000))

    async def call(self, request: Message) -> Sequence[Any]:
        match request:
            case weights_pb.GetWeightSpecsRequest():
                return [specs_response(self.weight_specs())]
            case weights_pb.PushRequest():
                return [await asyncio.to_thread(push, self, request, rank=0)]
            case weights_pb.PushSharedMemoryRequest():
                return [await asyncio.to_thread(SharedMemorySender().push, self, request, rank=0)]
        raise NotImplementedError(request)


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSecurity]:
    """The certificates of a run on several hosts, and a token."""
    with run_tls(tmp_path_factory.mktemp("run") / "tls") as tls:
        token = tls.directory / "token"
        write_private(token, b"secret\n")
        yield ServerSecurity(tls=True, roots=tls.roots, server_name=SERVER_NAME, token=token)


@pytest.fixture(scope="module")
def server(security: ServerSecurity) -> Iterator[ServerProcess]:
    """A server that requires TLS and the token."""
    assert security.roots is not None
    with running_server(
        *("--engine", "fake", "--security.token_file", str(security.token)),
        *("--security.tls_certificate", str(security.roots.with_name("certificate.pem"))),
        *("--security.tls_key", str(security.roots.with_name("key.pem"))),
    ) as process:
        yield process


async def _publish(
    server: ServerProcess, version: int, transport: str, security: ServerSecurity, folder: Path
) -> int:
    client = WeightSyncClient(
        "one",
        server.address,
        control_deadline_s=30,
        commit_deadline_s=30,
        security=security.read(),
    )
    publisher = WeightPublisher(
        cast(PolicyGroup, Rank()),
        WeightSyncConfig.model_validate({"transport": transport}),
        element_type="float32",
        directory=folder,
        security=security,
    )
    try:
        await publisher.publish(version, [client])
        return int((await client.info()).weight_version)
    finally:
        await client.aclose()


@pytest.mark.asyncio
async def test_every_call_is_encrypted_and_shows_the_token(
    server: ServerProcess, security: ServerSecurity, tmp_path: Path
) -> None:
    assert await _publish(server, 1, "inline", security, tmp_path) == 1
    assert await _publish(server, 2, "shared_memory", security, tmp_path) == 2


@pytest.mark.asyncio
async def test_without_them_nothing_is_sent(
    server: ServerProcess, security: ServerSecurity, tmp_path: Path
) -> None:
    with pytest.raises(WeightSyncError, match=r"BeginUpdate failed \(UNAVAILABLE\)"):
        await _publish(server, 9, "inline", ServerSecurity(), tmp_path)
    tokenless = replace(security, token=None)
    with pytest.raises(WeightSyncError, match="UNAUTHENTICATED"):
        await _publish(server, 9, "inline", tokenless, tmp_path)
    nameless = replace(security, server_name=None)  # the certificate does not name 127.0.0.1
    with pytest.raises(WeightSyncError, match="UNAVAILABLE"):
        await _publish(server, 9, "inline", nameless, tmp_path)
