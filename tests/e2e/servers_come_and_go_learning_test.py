"""Servers that join, are drained, die and come back while a run trains, each in its own process."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop.rpc import ChannelSecurity
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.rollout.v1.server_service_pb2 import GetServerInfoResponse
from treadle.rollout_server.testing import held_address, running_server
from treadle.trainer.demo import MODELS
from treadle.trainer.launch.process import child_python_path

from .testing import StartTrainer, Trainer

pytestmark = pytest.mark.timeout(600)

MODEL = str(MODELS["demo:calculator"])
_UNVALIDATED = ("schedule.val_every=null", "schedule.val_before_train=false")


def _servers(run_dir: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "treadle.trainer.main",
            "servers",
            *arguments,
            f"--run-dir={run_dir}",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": child_python_path()},
        check=False,
    )


def _listed(trainer: Trainer) -> dict[str, str]:
    """Returns the state of each server of the run, by address."""
    found = json.loads((trainer.run_dir / "servers" / "list.json").read_text())
    return {server["address"]: server["state"] for server in found["servers"]}


def _asked(address: str, token: Path) -> GetServerInfoResponse:
    """Returns what a server of a run tells."""
    security = ChannelSecurity(token=token.read_text().strip())

    async def ask() -> GetServerInfoResponse:
        client = WeightSyncClient(
            "joins", address, control_deadline_s=30, commit_deadline_s=30, security=security
        )
        try:
            return await client.info()
        finally:
            await client.aclose()

    return asyncio.run(ask())


def _curve(trainer: Trainer, steps: int) -> list[tuple[float, ...]]:
    names = ("step", "reward/mean", "tokens/sampled")
    return [tuple(line[name] for name in names) for line in trainer.metrics()[:steps]]


def test_the_curve_is_that_of_a_run_whose_servers_stay(
    start_trainer: StartTrainer, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("between us")
    token.chmod(0o600)
    arguments = (
        *("--engine", "torch", "--model.path", MODEL, "--model.num_threads", "1"),
        *("--model.context_length", "1024", "--security.token_file", str(token)),
    )
    with (
        held_address() as foreign,
        running_server(*arguments) as joins,
        contextlib.ExitStack() as dies,
    ):
        dies.enter_context(running_server(*arguments, "--address", foreign))
        trainer = start_trainer(
            *_UNVALIDATED,
            "schedule.total_steps=1000",
            "rollout.num_replicas=1",
            f"rollout.addresses=[{foreign}]",
            f"rollout.token_file={token}",
            "rollout.unresponsive_s=2",
        )
        trainer.read_until(" 2/1000")
        added = _servers(trainer.run_dir, "add", joins.address)
        assert added.returncode == 0, added.stderr
        assert f"{joins.address} serves, with weight version" in added.stdout
        again = _servers(trainer.run_dir, "add", joins.address)
        assert again.returncode == 2
        assert "is a server of this run already" in again.stderr
        dies.close()
        trainer.read_until("rollout server lost: attached-0")
        with running_server(*arguments, "--address", foreign):
            trainer.read_until("joined the run: attached-0")
            drained = _servers(trainer.run_dir, "drain", "rollout-0")
            assert drained.returncode == 0, drained.stderr
            trainer.read_until("was drained and leaves the run")
            serve = {joins.address: "serving", foreign: "serving"}
            for _ in range(10):  # the list is written each half second
                trainer.read_until("/1000")
                if _listed(trainer) == serve:
                    break
            assert _listed(trainer) == serve
            listed = _servers(trainer.run_dir, "list")
            assert foreign in listed.stdout and "someone else" in listed.stdout
            trainer.process.send_signal(signal.SIGINT)
            trainer.wait()
        steps = len(trainer.metrics())
        undisturbed = start_trainer(*_UNVALIDATED, f"schedule.total_steps={steps}", name="whole")
        assert undisturbed.wait() == 0, undisturbed.output
        assert _curve(trainer, steps) == _curve(undisturbed, steps)
    ended = _servers(trainer.run_dir, "list")
    assert ended.returncode == 2
    assert "has no servers now" in ended.stderr


def test_beside_training_a_server_that_is_started_again_samples_nothing_old(
    start_trainer: StartTrainer, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("between us")
    token.chmod(0o600)
    arguments = (
        *("--engine", "torch", "--model.path", MODEL, "--model.num_threads", "1"),
        *("--model.context_length", "1024", "--security.token_file", str(token)),
    )
    with contextlib.ExitStack() as servers:
        stays = servers.enter_context(running_server(*arguments))
        held = ("--address", servers.enter_context(held_address()))
        dies = servers.enter_context(running_server(*arguments, *held))
        trainer = start_trainer(
            *_UNVALIDATED,
            *("schedule.total_steps=1000", "schedule.kind=async", "schedule.max_staleness=2"),
            *("sync.in_flight=interrupt", "agent.num_workers=1", "run.trajectories_per_step=4"),
            f"rollout.addresses=[{stays.address},{dies.address}]",
            f"rollout.token_file={token}",
        )
        trainer.read_until(" 3/1000")
        dies.popen.kill()
        servers.enter_context(running_server(*arguments, *held))
        trainer.read_until("joined the run: attached-1")
        steps = len(trainer.metrics()) + 3
        trainer.read_until(f" {steps}/1000")
        trainer.process.send_signal(signal.SIGINT)
        trainer.wait()
    lines = trainer.trajectories()
    assert lines[-1]["step"] >= steps
    for line in lines:
        spans = [s for s in line["samples"][-1]["spans"] if s["origin"] == "sampled"]
        versions = [span["weight_version"] for span in spans]
        assert versions == sorted(versions)
        assert versions[0] >= line["step"] - 3
    assert sum(metrics["servers/restarted"] for metrics in trainer.metrics()) == 1


def test_one_that_joins_gets_everything_alone_and_the_next_update_with_the_others(
    start_trainer: StartTrainer,
) -> None:
    # The model must not have learned all before the server joins. Weights one version apart still
    # differ by 1e-2 in their log-probabilities.
    arguments = ("sync.transport=collective", "rollout.num_replicas=2", "policy.optimizer.lr=2e-5")
    trainer = start_trainer(*_UNVALIDATED, "schedule.total_steps=1000", *arguments)
    trainer.read_until(" 2/1000")
    _joins(trainer, "float32", apart=1e-3)


def test_what_does_not_fit_is_refused_where_it_is_asked_and_what_fits_joins_updates_by_changes(
    start_trainer: StartTrainer,
) -> None:
    trainer = start_trainer(
        *(*_UNVALIDATED, "schedule.total_steps=1000", "sync.delta.enabled=true"),
        *("rollout.dtype=bfloat16", "policy.optimizer.lr=1e-6"),
    )
    trainer.read_until(" 2/1000")
    token = trainer.run_dir / "server_token"
    with running_server("--engine", "fake", "--security.token_file", str(token)) as other:
        wrong_model = _servers(trainer.run_dir, "add", other.address)
    assert wrong_model.returncode == 2
    assert "tokenizer.json has sha256" in wrong_model.stderr
    nobody = _servers(trainer.run_dir, "drain", "rollout-7")
    assert nobody.returncode == 2
    assert "rollout-7 is no server of this run, which has rollout-0" in nobody.stderr
    only = _servers(trainer.run_dir, "drain", "rollout-0")
    assert "is the only server that takes new sessions" in only.stderr

    for line in _joins(trainer, "bfloat16", apart=0.2):  # of rounding
        assert line["sync/delta_ratio"] < 0.1


def _joins(trainer: Trainer, dtype: str, *, apart: float) -> list[Mapping[str, Any]]:
    """Lets a server join and stops the run some steps later; returns the metrics of these."""
    token = trainer.run_dir / "server_token"
    with running_server(
        *("--engine", "torch", "--model.path", MODEL, "--model.num_threads", "1"),
        *("--model.context_length", "1024", "--model.dtype", dtype),
        *("--security.token_file", str(token)),
    ) as joins:
        added = _servers(trainer.run_dir, "add", joins.address)
        assert added.returncode == 0, added.stderr
        joined = int(added.stdout.rsplit(maxsplit=1)[-1])
        trainer.read_until(f" {joined + 3}/1000")
        told = _asked(joins.address, token)
        trainer.process.send_signal(signal.SIGINT)
        trainer.wait()
    assert told.weight_version >= joined + 2
    assert told.time_use.decode.ToNanoseconds() > 0
    first, *lines = trainer.metrics()
    later = [line for line in lines if line["step"] > joined + 1]
    # What both sampled agrees with the policy: they have its weights. A batch without signal is not
    # computed.
    of_both = [line["rollout/logprob_diff_max"] for line in later if line["groups/with_signal"]]
    assert of_both and max(of_both) < apart
    for line in later:
        assert line["servers/lost"] == 0
        assert line["servers/live"] == first["servers/live"] + 1
    return later
