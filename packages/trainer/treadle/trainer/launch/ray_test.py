"""Tests with a real Ray, which `ray.init` starts."""

import asyncio
import contextlib
import hashlib
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from treadle.policy.client.process import wait_until_ended
from treadle.trainer.config.launch import RayLaunchConfig
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config, DataConfig, ModelConfig
from treadle.trainer.config.topology import Devices
from treadle.trainer.launch.process import LostProcessError, ProcessError, ProcessSpec
from treadle.trainer.launch.ray import RayLauncher, gpus_of_nodes
from treadle.trainer.rollout.server_pool import ServerPool

_PROGRAM = """
import argparse, os, signal, sys
from pathlib import Path
from treadle.tracing.child_process import write_ready
parser = argparse.ArgumentParser()
parser.add_argument("--ready_file", type=Path)
parser.add_argument("--host")
args = parser.parse_args()
print("runs on", sys.executable, "with", os.environ["ANSWER"], "child of", os.getppid())
write_ready(args.ready_file, f"{args.host}:1")
signal.pause()
"""


def _spec(name: str) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        module="treadle_ray_test_program",
        args=("--host", "{host}"),
        env={"ANSWER": "42"},
    )


def _parent(pid: str) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return stat.rpartition(")")[2].split()[1]


@pytest.mark.asyncio
@pytest.mark.timeout(400)
async def test_ray_runs_the_drivers_interpreter_and_refuses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "treadle_ray_test_program.py").write_text(_PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RayLaunchConfig(start_deadline_s=300.0)
    async with RayLauncher(config, tmp_path / "logs") as launcher:
        process = await launcher.start(_spec("child"))
        assert await process.ready(300) == "127.0.0.1:1"
        assert await wait_until_ended(process, 0.2) is None
        assert f"runs on {sys.executable} with 42" in await process.log_tail()
        await process.stop()
        assert await process.wait() < 0
        while "is gone with its actor on node" not in process.describe_end(await process.wait()):
            pass  # Ray ends the actor in its own time.
        # The directory of the logs is the driver's too.
        assert f"runs on {sys.executable} with 42" in await process.log_tail()
        (tmp_path / "logs" / "child.log").unlink()
        assert "no log: child: its Ray actor on node" in await process.log_tail()

        kills_itself = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
        killed = await launcher.start(ProcessSpec(name="killed", module="", command=kills_itself))
        with pytest.raises(LostProcessError, match="killed was ended by SIGKILL on node"):
            await killed.ready(300)

        # So the pool starts a server again that is killed while it first starts.
        command = (
            'for ready; do :; done; case "$ready" in */rollout-0.ready) kill -KILL $$;; esac; '
            """echo '{"address": "127.0.0.1:1"}' > "$ready.partial"; """
            'mv "$ready.partial" "$ready"; exec sleep 1000'
        )
        servers = Config(
            data=DataConfig(train_files=(Path("t.jsonl"),)),
            model=ModelConfig(path=Path("/m")),
            rollout=RolloutConfig(server_command=("sh", "-c", command, "server"), max_restarts=1),
        )
        async with ServerPool(launcher, servers) as pool:
            assert pool.take_metrics()["servers/restarted"] == 1
        assert "rollout server lost: rollout-0 was ended by SIGKILL on node" in caplog.text

        # An actor that stands still answers nothing; nobody waits for it for ever.
        still = await launcher.start(_spec("still"))
        await still.ready(300)
        monkeypatch.setattr("treadle.trainer.launch.ray._ANSWER_S", 0.5)
        monkeypatch.setattr("treadle.trainer.launch.ray.KILLED_S", 0.5)
        (supervisor,) = re.findall(r"child of (\d+)", await still.log_tail())
        actor = _parent(supervisor)
        (tmp_path / "logs" / "still.log").unlink()
        os.kill(int(actor), signal.SIGSTOP)
        try:
            assert "Ray actor gave no answer for 0.5 s" in await still.log_tail()
            with pytest.raises(ProcessError, match=r"actor gave no answer for 1 s"):
                await still.ready(0.5)
            await still.stop(0.0)
        finally:
            with contextlib.suppress(ProcessLookupError):  # Ray may have ended it
                os.kill(int(actor), signal.SIGCONT)
        assert "still: its Ray actor gave no answer for 1 s; Ray is told to end it" in caplog.text

        # The doctor's look at each node.
        model = tmp_path / "tokenizer.json"
        model.write_text("{}")
        digest = hashlib.sha256(b"{}").hexdigest()
        ((address, problems),) = (
            await launcher.examine(
                programs={"policy.command": sys.executable}, files={model: digest}
            )
        ).items()
        (node,) = ray.nodes()  # type: ignore[no-untyped-call]
        assert (address, problems) == (node["NodeManagerAddress"], [])
        assert launcher.resources()["CPU"] > 1
        model.write_text("{ }")
        ((_, problems),) = (
            await launcher.examine(
                programs={"rollout.server_command": "/nowhere/server"},
                files={model: digest, tmp_path / "config.json": digest},
            )
        ).items()
        assert re.search(r"has no /nowhere/server, with which rollout\.server_command", problems[0])
        assert f"{model} has sha256" in problems[1]
        assert f"the driver's has {digest[:12]}" in problems[1]
        assert f"cannot read {tmp_path / 'config.json'}" in problems[2]

        real = sys.executable
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        ((_, problems),) = (await launcher.examine(programs={}, files={})).items()
        assert "has no /nowhere/python, the driver's interpreter" in problems[0]
        with pytest.raises(ProcessError, match=f"where Ray runs {real}, has no /nowhere/python"):
            await launcher.start(_spec("other"))

        monkeypatch.setattr(sys, "executable", real)
        monkeypatch.setattr(
            "treadle.trainer.launch.ray._own_versions", lambda: {"python": "3.99.0"}
        )
        with pytest.raises(ProcessError, match=r"the driver has 3\.99\.0"):
            await launcher.start(_spec("another"))


@pytest.mark.asyncio
@pytest.mark.timeout(400)
async def test_processes_have_the_gpus_of_their_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray believes that the nodes have GPUs; what a process is shown is all that matters here."""
    from ray.cluster_utils import Cluster

    (tmp_path / "treadle_ray_test_program.py").write_text(
        _PROGRAM.replace("ANSWER", "CUDA_VISIBLE_DEVICES")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    small: dict[str, Any] = {"num_cpus": 4, "num_gpus": 3, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        cluster.add_node(**small)
        config = RayLaunchConfig(
            address=cluster.address,
            nodes=2,
            gpus_per_node=3,
            start_deadline_s=300.0,
        )
        seen = []
        async with RayLauncher(config, tmp_path / "logs") as launcher:
            for number, devices in enumerate(
                (Devices(0, (0,)), Devices(0, (0, 1)), Devices(1, (2,)))
            ):
                spec = replace(_spec(f"child-{number}"), env={}, devices=devices)
                process = await launcher.start(spec)
                await process.ready(300)
                seen += re.findall(r"with ([\d,]+) child", await process.log_tail())
        assert seen == ["0", "0,1", "2"]
        assert await asyncio.to_thread(gpus_of_nodes, cluster.address) == [3, 3]
        # The GPUs are free again, and more of them are not there.
        more = config.model_copy(update={"gpus_per_node": 4, "start_deadline_s": 3.0})
        with pytest.raises(ProcessError, match=r"gpus_per_node=4: .* its nodes have 3, 3"):
            await RayLauncher(more, tmp_path / "logs").__aenter__()
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
