"""Which servers are in the rotation, with processes that start and die when a test says so."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from treadle.trainer.config.schema import DataConfig, ModelConfig, RolloutConfig, RunConfig
from treadle.trainer.launch.process import ProcessError, ProcessSpec
from treadle.trainer.rollout.server_pool import ReplicaSet, ReplicasLostError


@dataclass
class _Process:
    name: str
    may_serve: asyncio.Event
    fails: bool
    status: int | None = None
    stopped: bool = False

    async def ready(self, deadline_s: float) -> str:
        await self.may_serve.wait()
        if self.fails:
            raise ProcessError(f"{self.name} has no engine")
        return "127.0.0.1:1"  # where nobody answers, which is not to be dead

    async def poll(self) -> int | None:
        return self.status

    async def log_tail(self, lines: int = 20) -> str:
        return "its last words"

    async def stop(self, grace_s: float = 10.0) -> None:
        self.stopped = True


@dataclass
class _Launcher:
    may_serve: asyncio.Event = field(default_factory=asyncio.Event)
    processes: dict[str, _Process] = field(default_factory=dict)
    fail: bool = False

    async def start(self, spec: ProcessSpec) -> _Process:
        process = _Process(spec.name, self.may_serve, self.fail)
        self.processes[spec.name] = process
        return process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...


def _replicas(launcher: _Launcher, **rollout: Any) -> ReplicaSet:
    config = RunConfig(
        data=DataConfig(train_files=(Path("t.jsonl"),)),
        model=ModelConfig(path=Path("/m")),
        rollout=RolloutConfig.model_validate({"num_replicas": 2, **rollout}),
    )
    launcher.may_serve.set()
    return ReplicaSet(launcher, config, weights_directory=Path("/w"))


def _names(replicas: ReplicaSet) -> list[str]:
    return [replica.name for replica in replicas.live]


@pytest.mark.asyncio
async def test_the_others_go_on_while_a_server_starts_again() -> None:
    launcher = _Launcher()
    async with _replicas(launcher) as replicas:
        launcher.processes["rollout-0"].status = -9
        launcher.may_serve.clear()
        assert "was ended by SIGKILL" in (await replicas.look())[0]
        assert await replicas.revive() == []
        assert _names(replicas) == ["rollout-1"]
        launcher.may_serve.set()
        await asyncio.wait(replicas._starting.values())
        assert await replicas.revive() == ["rollout-0"]
        assert _names(replicas) == ["rollout-0", "rollout-1"]
        metrics = {"servers/live": 2.0, "servers/lost": 1.0, "servers/restarted": 1.0}
        assert replicas.take_metrics() == metrics
        assert replicas.take_metrics()["servers/lost"] == 0
    assert launcher.processes["rollout-0-restart-1"].stopped


@pytest.mark.asyncio
@pytest.mark.parametrize("rollout", [{"num_replicas": 1}, {"release_memory": True}])
async def test_a_run_that_cannot_go_on_waits_for_the_start(rollout: dict[str, Any]) -> None:
    launcher = _Launcher()
    async with _replicas(launcher, **rollout) as replicas:
        before = _names(replicas)
        launcher.processes["rollout-0"].status = 1
        await replicas.look()
        assert await replicas.revive() == ["rollout-0"]
        assert _names(replicas) == before


@pytest.mark.asyncio
async def test_a_server_that_does_not_start_is_tried_until_no_restart_is_left() -> None:
    launcher = _Launcher()
    async with _replicas(launcher, num_replicas=1, max_restarts=2) as replicas:
        launcher.fail = True
        launcher.processes["rollout-0"].status = 1
        await replicas.look()
        with pytest.raises(ReplicasLostError, match=r"(?s)after 2 restarts .*has no engine"):
            await replicas.revive()
        assert launcher.processes["rollout-0-restart-2"].stopped


@pytest.mark.asyncio
async def test_a_start_under_way_ends_with_the_set() -> None:
    launcher = _Launcher()
    async with _replicas(launcher) as replicas:
        launcher.processes["rollout-0"].status = 1
        launcher.may_serve.clear()
        await replicas.look()
        assert await replicas.revive() == []
        (start,) = replicas._starting.values()
    assert start.cancelled()
