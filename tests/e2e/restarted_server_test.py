"""Servers that someone else runs, in processes: one is started again, one joins a rollout."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopRegistry,
    Message,
    RequestContext,
    SamplingParams,
    Services,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.rpc import Requirements
from treadle.policy.client.group import PolicyGroup
from treadle.policy.testing.weights_only import Weights
from treadle.policy.weight_sync.errors import WeightSyncError
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.rollout_server.testing import ServerProcess, held_address
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.server_pool import ServerPool


class Unaware(ServerPool):
    """It asks a server once an hour how it is, so that a test is always before it notices."""

    _ASK_AGAIN_S: ClassVar[float] = 3600.0

    async def versions(self, session: str) -> set[int]:
        """Returns the versions that sample a completion which may be of any."""
        request = RequestContext(request_id="r", session_id=session, deadline=math.inf)
        completion = await self.generator.generate(
            (1, 2, 3), SamplingParams(max_tokens=4), request=request
        )
        return {chunk.weight_version for chunk in completion.chunks}

    async def until_answers(self, address: str) -> None:
        """Returns when the server answers on the connection that its predecessor had."""
        (client,) = (server.client for server in self.live if server.address == address)
        while True:
            with contextlib.suppress(WeightSyncError):
                await client.info()
                return


@contextlib.asynccontextmanager
async def trained_to_version_3(directory: Path, *settings: str) -> AsyncIterator[Unaware]:
    """Yields a connected pool whose servers have weights of version 3."""
    config = _config(*settings)
    publisher = WeightPublisher(
        cast(PolicyGroup, Weights()), config.sync, element_type="float32", directory=directory
    )
    async with (
        LocalLauncher(directory) as launcher,
        Unaware(launcher, config, publish=publisher.publish) as pool,
    ):
        await pool.connect(Requirements())
        await pool.sync_weights(3)
        yield pool


def _config(*settings: str) -> Config:
    return load_config([], ["model.path=/m", "data.train_files=/t.jsonl", *settings]).config


def _server(address: str = "127.0.0.1:0") -> ServerProcess:
    return ServerProcess("--engine", "fake", "--address", address)


@pytest.mark.asyncio
async def test_a_server_that_was_started_again_samples_nothing_before_it_has_the_present_weights(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(held_address()) for _ in range(2)]
        started = [stack.enter_context(_server(address)) for address in held]
        servers = {server.wait_ready().address: server for server in started}
        addresses = f"rollout.addresses=[{','.join(servers)}]"
        async with trained_to_version_3(tmp_path, addresses) as pool:
            assert await pool.versions("here") == {3}
            (address,) = (a for a in servers if pool.generator.sessions_at(a))
            servers[address].close()
            await asyncio.to_thread(stack.enter_context(_server(address)).wait_ready)
            await pool.until_answers(address)
            # It holds version 0, and nobody has noticed: the session continues at the other one.
            assert len(pool.routes.serving) == 2
            assert await pool.versions("here") == {3}
            assert pool.generator.sessions_at(address) == 0

            assert await pool.ensure_healthy()
            assert address not in pool.routes.serving
            await pool.wait_for_change()
            assert await pool.ensure_healthy()
            assert address in pool.routes.serving
            pool.drain(next(a for a in servers if a != address), now=True)
            assert await pool.versions("new") == {3}
            assert pool.generator.sessions_at(address) == 1


class Waits:
    """Each trajectory takes a turn; the first one then waits for a tool."""

    def __init__(self) -> None:
        self.turns = asyncio.Queue[set[int]]()
        self.tool = asyncio.Event()

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        request = RequestContext(
            request_id="r", session_id=str(task.rollout_index), deadline=services.deadline
        )
        sampled = await services.generator.generate((1, 2), services.sampling, request=request)
        self.turns.put_nowait({chunk.weight_version for chunk in sampled.chunks})
        if not task.rollout_index:
            await self.tool.wait()
        return Trajectory(
            task=task, samples=(), messages=task.messages, stop=StopReason.FINISHED, reward=1.0
        )


@pytest.mark.asyncio
async def test_a_server_that_is_added_serves_the_rollout_that_runs(tmp_path: Path) -> None:
    loop, settings = Waits(), ("rollout.max_in_flight=1", "agent.max_attempts=1")
    with _server() as first, _server() as added:
        addresses = f"rollout.addresses=[{first.wait_ready().address}]"
        async with trained_to_version_3(tmp_path, addresses, *settings) as pool:
            loops = SimpleNamespace(loops=LoopRegistry({"waits": loop}), tools={}, interactions={})
            rollout = Rollout(
                config=_config(addresses, *settings),
                servers=pool,
                renderer=cast(Any, None),
                rules=cast(Any, loops),
                reward=lambda _: 1.0,
            )
            tasks = [
                AgentTask(
                    task_id="train/0",
                    sample_index=0,
                    rollout_index=index,
                    loop="waits",
                    messages=(Message(role="user", content="hi"),),
                )
                for index in range(2)
            ]
            running = asyncio.create_task(
                rollout.run(
                    tasks,
                    SamplingParams(max_tokens=4),
                    min_weight_version=3,
                    on_end=lambda _: None,
                )
            )
            assert await loop.turns.get() == {3}
            await asyncio.to_thread(added.wait_ready)
            await (await pool.add(added.address))
            # There was one place, and the first trajectory has it still.
            assert await loop.turns.get() == {3}
            loop.tool.set()
            assert [trajectory.reward for trajectory in await running] == [1.0, 1.0]
