"""Runs on several Ray nodes, which are processes of this machine, each with its address.

Their network is loopback, so what is shown of it is who is let in and where processes are placed.
"""

import contextlib
import json
import re
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from treadle.trainer.config.launch import RayLaunchConfig
from treadle.trainer.config.topology import Devices
from treadle.trainer.launch.process import ProcessError, ProcessSpec
from treadle.trainer.launch.ray import RayLauncher

from .testing import StartTrainer, Trainer

pytestmark = pytest.mark.timeout(900)

_UNVALIDATED = ("schedule.val_every=null", "schedule.val_before_train=false")
_STORE = 80 << 20


@contextlib.contextmanager
def _cluster(*, head_cpus: int) -> Iterator[Cluster]:
    """A cluster whose head, on which the driver is, has room for some processes."""
    small: dict[str, Any] = {"num_cpus": head_cpus, "object_store_memory": _STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


class _Nodes:
    """Nodes of a cluster beside its head, by address."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._by_address: dict[str, Any] = {}

    def add(self, *, cpus: int, gpus: int = 0) -> str:
        """Adds a node with room for some processes; returns its address.

        Ray believes that it has the GPUs.
        """
        address = f"127.0.0.{2 + len(self._by_address)}"
        self._by_address[address] = self._cluster.add_node(
            num_cpus=cpus, num_gpus=gpus, object_store_memory=_STORE, node_ip_address=address
        )
        return address

    def kill(self, address: str) -> None:
        """Kills everything on a node, as a power cut does."""
        self._cluster.remove_node(self._by_address[address], allow_graceful=False)


def _address_of(trainer: Trainer, name: str) -> tuple[str, int]:
    ready = json.loads((trainer.run_dir / "logs" / f"{name}.ready").read_text())
    host, _, port = ready["address"].rpartition(":")
    return host, int(port)


def _speaks_tls(address: tuple[str, int]) -> bool:
    """Whether a server shakes hands; its certificate is of an authority that nobody here knows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with socket.create_connection(address, timeout=60) as plain:
        try:
            context.wrap_socket(plain, server_hostname="run.treadle.internal").close()
        except ssl.SSLCertVerificationError:
            return True
    return False


def test_a_node_takes_a_server_and_another_one_the_policy(start_trainer: StartTrainer) -> None:
    with _cluster(head_cpus=0) as cluster:
        nodes = _Nodes(cluster)
        for _ in range(3):
            nodes.add(cpus=1)  # room for one process
        trainer = start_trainer(
            *_UNVALIDATED,
            "schedule.total_steps=1000",
            "schedule.save_every=2",
            "rollout.num_replicas=2",
            "launch=ray",
            f"launch.address={cluster.address}",
            "launch.max_failures=1",
        )
        trainer.read_until(" 2/1000")
        at = {name: _address_of(trainer, name) for name in ("policy-0", "rollout-0", "rollout-1")}
        assert len({host for host, _ in at.values()}) == 3
        assert all(_speaks_tls(address) for address in at.values())
        secrets = trainer.run_dir / "tls"
        assert {path.stat().st_mode & 0o777 for path in secrets.iterdir()} == {0o600}

        spare = nodes.add(cpus=2)
        nodes.kill(at["rollout-0"][0])
        lost = trainer.read_until("rollout server lost: rollout-0")
        assert f"is gone with its actor on node {at['rollout-0'][0]}" in lost
        trainer.read_until("started again: rollout-0")
        assert _address_of(trainer, "rollout-0-restart-1")[0] == spare

        nodes.kill(at["policy-0"][0])
        note = trainer.read_until("the run resumed by itself, after policy rank 0")
        (step,) = map(int, re.findall(r"step (\d+):", note))
        trainer.read_until(f" {step + 1}/1000")
        assert {_address_of(trainer, name)[0] for name in at} == {spare, at["rollout-1"][0]}
        trainer.process.send_signal(signal.SIGINT)
        assert trainer.wait() == 130, trainer.output
        assert not secrets.exists()
    logs = "".join(path.read_text() for path in (trainer.run_dir / "logs").glob("*.log"))
    assert "PRIVATE KEY" not in logs
    whole = start_trainer(*_UNVALIDATED, f"schedule.total_steps={step + 1}", name="whole")
    assert whole.wait() == 0, whole.output
    assert trainer.curve()[: step + 1] == whole.curve()[: step + 1]


def test_loop_workers_and_their_router_are_encrypted_too(start_trainer: StartTrainer) -> None:
    with _cluster(head_cpus=8) as cluster:
        trainer = start_trainer(
            *_UNVALIDATED,
            "schedule.total_steps=1000",
            "launch=ray",
            f"launch.address={cluster.address}",
            "agent.num_workers=1",
        )
        trainer.read_until(" 1/1000")
        for name in ("worker-0", "router", "rollout-0", "policy-0"):
            assert _speaks_tls(_address_of(trainer, name)), name
        trainer.process.send_signal(signal.SIGINT)
        assert trainer.wait() == 130, trainer.output


_PROGRAM = """
import argparse, os, signal
from pathlib import Path
from treadle.tracing.child_process import write_ready
parser = argparse.ArgumentParser()
for name in ("--ready_file", "--host"):
    parser.add_argument(name)
args = parser.parse_args()
print("sees GPUs", os.environ["CUDA_VISIBLE_DEVICES"])
write_ready(Path(args.ready_file), f"{args.host}:1")
signal.pause()
"""


@pytest.mark.asyncio
async def test_reserved_gpus_are_those_of_the_node_in_place_of_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "treadle_nodes_test_program.py").write_text(_PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))

    def spec(name: str) -> ProcessSpec:
        """A server with two GPUs, which are on one node."""
        return ProcessSpec(
            name=name,
            module="treadle_nodes_test_program",
            args=("--host", "{host}"),
            devices=Devices(1, (0, 1)),
        )

    with _cluster(head_cpus=1) as cluster:
        nodes = _Nodes(cluster)
        places = {nodes.add(cpus=2, gpus=2) for _ in range(2)}
        config = RayLaunchConfig(
            address=cluster.address, nodes=2, gpus_per_node=2, start_deadline_s=120
        )
        tls = tmp_path / "tls"
        async with RayLauncher(config, tmp_path / "logs", tls_directory=tls) as launcher:
            first = await launcher.start(spec("first"))
            place = (await first.ready(120)).removesuffix(":1")
            assert place in places
            spare = nodes.add(cpus=2, gpus=2)  # Ray wants the main thread
            nodes.kill(place)
            ended = first.describe_end(await first.wait())
            assert ended.startswith(f"is gone with its actor on node {place} (")
            assert "sees GPUs 0,1" in await first.log_tail()  # in the directory that all share
            second = await launcher.start(spec("second"))
            assert await second.ready(120) == f"{spare}:1"
            assert "sees GPUs 0,1" in await second.log_tail()

            nodes.kill(spare)
            await second.wait()
            launcher._config = config.model_copy(update={"start_deadline_s": 5.0})
            with pytest.raises(ProcessError, match=r"node 1 of launch.nodes=2 is gone, and the"):
                await launcher.start(spec("third"))
        assert not tls.exists()
