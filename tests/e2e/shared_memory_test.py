"""Shared memory between real processes: whole versions, and what is left when one is killed.

A rank here has only weights. As a process (`python shared_memory_test.py ADDRESS UPDATE`) it
reports when it has sent half of them, and continues when told.
"""

import asyncio
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator

import pytest
import torch

from treadle.policy.client.types import NamedTensor, TensorSpec
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.payload import tensor_spec_to_proto
from treadle.policy.weight_sync.transports.shared_memory import SharedMemorySender
from treadle.rollout.v1 import server_service_pb2 as server_pb
from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.testing import running_server

_SIZE = 2048
_NAMES = [f"t{number}" for number in range(6)]


class HalfwayWeights:
    """Six weights that fill a slot each; `halfway` is called before the fourth.

    By then every server has given a slot back.
    """

    def __init__(self, halfway: Callable[[], object]) -> None:
        self._halfway = halfway

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name=name, shape=(_SIZE,), element_type="float32", sender=0)
            for name in _NAMES
        )

    def export_weights(self) -> Iterator[NamedTensor]:
        for number, name in enumerate(_NAMES):
            if number == 3:
                self._halfway()
            yield NamedTensor(name=name, tensor=torch.full((_SIZE,), float(number)))


def push(
    update_id: str, targets: dict[str, str], halfway: Callable[[], object] = lambda: None
) -> weights_pb.PushSharedMemoryResponse:
    """Pushes as a rank does; `targets` are addresses by name."""
    command = weights_pb.PushSharedMemoryRequest(
        update_id=update_id,
        element_type="float32",
        targets=tuple(
            weights_pb.SharedMemoryTarget(name=name, address=at) for name, at in targets.items()
        ),
        bucket_bytes=1,
        deadline_s=60,
    )
    return SharedMemorySender().push(HalfwayWeights(halfway), command, rank=0)


def client_of(address: str) -> WeightSyncClient:
    return WeightSyncClient("server", address, control_deadline_s=30, commit_deadline_s=30)


async def begin(client: WeightSyncClient, update_id: str, *, in_place: bool = False) -> None:
    specs = HalfwayWeights(lambda: None).weight_specs()
    request = pb.BeginUpdateRequest(
        update_id=update_id,
        weight_version=1,
        tensors=[tensor_spec_to_proto(spec, "float32") for spec in specs],
    )
    request.lease.FromSeconds(60)
    request.shared_memory.SetInParent()
    if in_place:
        request.in_place.in_flight = pb.IN_FLIGHT_POLICY_DRAIN
    await client.begin(request)


async def until_dropped(client: WeightSyncClient, update_id: str) -> None:
    """Waits until the server has dropped the update."""
    with pytest.raises(WeightSyncError) as caught:
        while True:
            await client.received(update_id)
    assert caught.value.outcome is Outcome.RESTART
    await client.abort(update_id)


@pytest.mark.asyncio
@pytest.mark.parametrize("in_place", [False, True])
async def test_a_rank_that_is_killed_halfway_leaves_no_half_version(in_place: bool) -> None:
    with running_server("--engine", "fake") as server:
        client = client_of(server.address)
        await begin(client, "u", in_place=in_place)
        rank = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, server.address, "u"), stdin=PIPE, stdout=PIPE
        )
        assert rank.stdout is not None
        assert await rank.stdout.readline() == b"halfway\n"
        rank.kill()
        await rank.wait()
        await until_dropped(client, "u")
        info = await client.info()
        assert info.weight_version == 0
        left = server_pb.SERVER_STATE_LOADING if in_place else server_pb.SERVER_STATE_SERVING
        assert info.state == left

        await begin(client, "v")
        assert not (await asyncio.to_thread(push, "v", {"server": server.address})).errors
        assert await client.commit("v", pb.IN_FLIGHT_POLICY_DRAIN) == 1
        assert (await client.info()).state == server_pb.SERVER_STATE_SERVING
        await client.aclose()


@pytest.mark.asyncio
async def test_a_server_that_is_killed_halfway_is_named_and_the_other_goes_on() -> None:
    halfway, go_on = threading.Event(), threading.Event()

    def halt() -> None:
        halfway.set()
        go_on.wait()

    with running_server("--engine", "fake") as one, running_server("--engine", "fake") as two:
        clients = [client_of(one.address), client_of(two.address)]
        for client in clients:
            await begin(client, "u")
        targets = {"one": one.address, "two": two.address}
        pushing = asyncio.create_task(asyncio.to_thread(push, "u", targets, halt))
        await asyncio.to_thread(halfway.wait)
        one.popen.kill()
        one.popen.wait()
        go_on.set()
        report = await pushing
        assert list(report.errors) == ["one"]
        assert "one: PushBuckets failed (UNAVAILABLE)" in report.errors["one"]
        assert await clients[1].commit("u", pb.IN_FLIGHT_POLICY_DRAIN) == 1
        for client in clients:
            await client.aclose()


def _halt() -> None:
    sys.stdout.write("halfway\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    push(sys.argv[2], {"server": sys.argv[1]}, _halt)
