"""Weights through a collective group into torch engines behind real servers.

They come from Megatron's ranks or from a rank that a test drives; members die in the middle.
"""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from treadle.policy.client.group import PolicyError
from treadle.policy.config.policy import ParallelConfig, PolicyConfig
from treadle.policy.config.weight_sync import CollectiveTransportConfig, WeightSyncConfig
from treadle.policy.testing.tiny import write_model
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import WeightSyncError
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.rollout.v1 import server_service_pb2 as server_pb
from treadle.rollout_server.engine import (
    ElementType,
    EngineRequest,
    Sampling,
    Tokens,
)
from treadle.rollout_server.engines.torch import ModelSource, TorchEngine
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.testing.clock import FakeClock
from treadle.rollout_server.testing.process import ServerProcess
from treadle.rollout_server.testing.serving import serve_in_process
from treadle.trainer.launch.local import LocalProcess

from .policies import DrivenPolicy, ranks

BUCKET_BYTES = 1 << 16
"""Makes about ten buckets of the tiny model."""


def config(**changes: Any) -> WeightSyncConfig:
    """Returns a collective transport's config; by default it waits longer than any test takes."""
    timeout_s = changes.pop("timeout_s", 250.0)
    transport = CollectiveTransportConfig(bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s)
    return WeightSyncConfig(transport=transport, **changes)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's model: tied, so that the last stage has a copy that it must not send."""
    path = tmp_path_factory.mktemp("policy-model")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    """What the servers start with: the same model with other weights."""
    path = tmp_path_factory.mktemp("other-model")
    model = write_model(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    model.save_pretrained(path)
    return path


async def load(path: Path) -> TorchEngine:
    """Loads an engine on the CPU."""
    source = ModelSource(path=path, dtype=ElementType.FLOAT32, device="cpu")
    return await TorchEngine.load(source, max_num_seqs=4, prefix_cache_bytes=1 << 20, num_threads=1)


async def greedy(engine: TorchEngine) -> list[tuple[int, float]]:
    """Returns the token ids and log-probabilities of a completion."""
    sampling = Sampling(max_tokens=12, seed=1, ignore_eos=True)
    request = EngineRequest(request_id="r", prompt=(5, 6, 7), sampling=sampling, logprobs=True)
    return [
        pair
        async for event in engine.generate(request)
        if isinstance(event, Tokens)
        for pair in zip(event.token_ids, event.logprobs, strict=True)
    ]


def parameters(engine: TorchEngine) -> dict[str, torch.Tensor]:
    """Returns the weights that the engine samples from."""
    return dict(engine._model._parameters)


def driven_by(policy: Any, directory: Path, **changes: Any) -> WeightPublisher:
    """Returns a publisher of the weights of `policy`, which stands for a group of ranks."""
    return WeightPublisher(policy, config(**changes), element_type="float32", directory=directory)


async def settled(replica: Replica) -> None:
    """Waits until the server is no longer being updated."""
    left = asyncio.Event()

    def look(state: ServerState) -> None:
        if state is not ServerState.UPDATING:
            left.set()

    replica.lifecycle.observe(look)
    look(replica.state)
    await left.wait()


Client = Callable[[str, str], WeightSyncClient]


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    """Makes clients of (name, address)."""
    async with AsyncExitStack() as stack:

        def connect(name: str, address: str) -> WeightSyncClient:
            made = WeightSyncClient(name, address, control_deadline_s=30, commit_deadline_s=60)
            stack.push_async_callback(made.aclose)
            return made

        yield connect


@pytest.mark.asyncio
async def test_megatron_in_four_parts_reaches_two_servers_bit_by_bit(
    model_path: Path, other_path: Path, tmp_path: Path, client: Client
) -> None:
    fresh = await load(model_path)
    engines = [await load(other_path) for _ in range(2)]
    before = await greedy(engines[0])
    async with (
        serve_in_process(engines[0]) as first,
        serve_in_process(engines[1]) as second,
        ranks(
            model_path, tmp_path, PolicyConfig(parallel=ParallelConfig(tensor=2, pipeline=2))
        ) as policy,
    ):
        servers = [client("first", first.address), client("second", second.address)]
        publisher = driven_by(policy, tmp_path)
        for version in (1, 2):
            report = await publisher.publish(version, servers)
            assert (report.served, report.failed) == (("first", "second"), {})
        # A server alone, as after a restart: another group.
        report = await publisher.publish(3, servers[:1])
        assert report.served == ("first",)
        wanted = await greedy(fresh)
        assert wanted != before
        for engine in engines:
            for name, tensor in parameters(fresh).items():
                assert torch.equal(parameters(engine)[name], tensor), name
            assert await greedy(engine) == wanted
        assert [engine.weight_version for engine in engines] == [3, 2]
    await fresh.aclose()


async def state_of(server: WeightSyncClient) -> tuple[str, int]:
    """Returns the state and version that the server reports."""
    info = await server.info()
    return server_pb.ServerState.Name(info.state).removeprefix("SERVER_STATE_"), info.weight_version


def serve_process(path: Path) -> ServerProcess:
    """Returns a torch server in its own process."""
    return ServerProcess(
        *("--engine", "torch", "--model.path", str(path), "--model.device", "cpu"),
        *("--model.dtype", "float32", "--model.num_threads", "1"),
    )


@pytest.mark.asyncio
async def test_a_server_killed_in_the_middle_costs_the_others_nothing(
    model_path: Path, other_path: Path, tmp_path: Path, client: Client
) -> None:
    fresh, engine = await load(model_path), await load(other_path)
    policy = DrivenPolicy(model_path)
    with serve_process(other_path) as doomed:
        await asyncio.to_thread(doomed.wait_ready)
        async with serve_in_process(engine) as kept:
            servers = [client("kept", kept.address), client("doomed", doomed.address)]
            publisher = driven_by(policy, tmp_path)

            def kill(name: str) -> None:
                if name == "model.norm.weight":  # The last one, when others are on their way.
                    doomed.popen.kill()
                    doomed.popen.wait()

            policy.before = kill
            report = await publisher.publish(1, servers)
            assert report.served == ("kept",) and set(report.failed) == {"doomed"}
            assert await state_of(servers[0]) == ("SERVING", 1)
            policy.before = lambda name: None
            assert (await publisher.publish(2, servers[:1])).served == ("kept",)
            assert await greedy(engine) == await greedy(fresh)
    policy.close()
    await fresh.aclose()


@pytest.mark.asyncio
async def test_a_server_that_cannot_write_is_dropped_and_the_others_serve(
    model_path: Path, other_path: Path, tmp_path: Path, client: Client
) -> None:
    engines = [await load(other_path) for _ in range(2)]
    policy = DrivenPolicy(model_path)
    async with (
        serve_in_process(engines[0]) as well,
        serve_in_process(engines[1]) as ill,
    ):
        servers = [client("well", well.address), client("ill", ill.address)]

        def overwrite(name: str, value: torch.Tensor) -> None:
            raise MemoryError("no room")

        engines[1]._model.overwrite = overwrite  # type: ignore[method-assign]
        report = await driven_by(policy, tmp_path).publish(1, servers)
        assert report.served == ("well",) and set(report.failed) == {"ill"}
        assert await state_of(servers[0]) == ("SERVING", 1)
        assert await state_of(servers[1]) == ("FAILED", 0)
    policy.close()


@pytest.mark.asyncio
async def test_a_policy_killed_in_the_middle_leaves_servers_that_take_the_next_update(
    model_path: Path, other_path: Path, tmp_path: Path, client: Client
) -> None:
    engine = await load(other_path)
    came, goes_on = asyncio.Event(), threading.Event()
    overwrite, loop = engine._model.overwrite, asyncio.get_running_loop()

    def stand_at_first(name: str, value: torch.Tensor) -> None:
        loop.call_soon_threadsafe(came.set)
        goes_on.wait()
        overwrite(name, value)

    engine._model.overwrite = stand_at_first  # type: ignore[method-assign]
    async with serve_in_process(engine) as running:
        server = client("server", running.address)
        with pytest.raises(PolicyError, match="SIGKILL"):
            async with ranks(model_path, tmp_path / "logs", PolicyConfig()) as policy:
                publishing = driven_by(policy, tmp_path).publish(1, [server])
                task = asyncio.create_task(publishing)
                await came.wait()
                rank = policy._ranks[0].process
                assert isinstance(rank, LocalProcess)
                os.kill(rank.pid, signal.SIGKILL)
                await task
        goes_on.set()
        await settled(running.replica)  # It notices by itself.
        assert await state_of(server) == ("LOADING", 0)
        driven = DrivenPolicy(model_path)
        assert (await driven_by(driven, tmp_path).publish(1, [server])).served == ("server",)
        assert await state_of(server) == ("SERVING", 1)
        driven.close()


@pytest.mark.asyncio
async def test_a_lease_that_runs_out_ends_the_receiving(
    model_path: Path, other_path: Path, tmp_path: Path, client: Client
) -> None:
    engine, clock = await load(other_path), FakeClock()
    policy = DrivenPolicy(model_path)
    stands, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def stand(name: str) -> None:
        if name == "model.norm.weight":
            loop.call_soon_threadsafe(stands.set)
            goes_on.wait()

    async with serve_in_process(engine, clock=clock) as running:
        server = client("server", running.address)
        policy.before = stand
        publisher = driven_by(policy, tmp_path, max_push_attempts=1)
        publishing = asyncio.create_task(publisher.publish(1, [server]))
        try:
            await stands.wait()
            clock.advance(61)  # The default lease; the trainer renews it by another clock.
            await settled(running.replica)
        finally:
            goes_on.set()
        with pytest.raises(WeightSyncError, match="gave the update up"):
            await publishing
        assert await state_of(server) == ("LOADING", 0)
        policy.before = lambda name: None
        assert (await publisher.publish(1, [server])).served == ("server",)
    policy.close()


@pytest.mark.asyncio
async def test_a_server_that_went_away_between_two_updates_leaves_a_group_of_the_others(
    model_path: Path, other_path: Path, tmp_path: Path, client: Client
) -> None:
    policy = DrivenPolicy(model_path)
    publisher = driven_by(policy, tmp_path)
    async with serve_in_process(await load(other_path)) as stays:
        async with serve_in_process(await load(other_path)) as leaves:
            servers = [client("stays", stays.address), client("leaves", leaves.address)]
            assert (await publisher.publish(1, servers)).served == ("stays", "leaves")
        report = await publisher.publish(2, servers)
        assert report.served == ("stays",) and set(report.failed) == {"leaves"}
        assert await state_of(servers[0]) == ("SERVING", 2)
    policy.close()
