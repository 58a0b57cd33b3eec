"""Failures of a run: a killed trainer, server or rank, and an interrupt."""

import os
import random
import re
import select
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from treadle.trainer.report import read_status

from .testing import StartTrainer, Trainer

pytestmark = pytest.mark.timeout(600)

_ENDLESS = "schedule.total_steps=1000"
_UNVALIDATED = ("schedule.val_every=null", "schedule.val_before_train=false")
_SAVED = ("schedule.save_every=2", "schedule.val_every=4")


def test_a_killed_trainer_resumes_and_gives_the_same_curve(start_trainer: StartTrainer) -> None:
    killed = start_trainer(*_SAVED, _ENDLESS, name="killed")
    killed.read_until(" 3/1000")
    _stranger_is_refused(killed)
    server = os.pidfd_open(killed.pid_of("rollout-0"))
    rank = os.pidfd_open(killed.pid_of("policy-0"))
    killed.read_until(" 4/1000")
    killed.kill_in_a_step(" 5/1000", random.Random("sync").random())
    assert read_status(killed.run_dir).state == "killed"
    _await_end(server)
    _await_end(rank)

    # Damage is noticed, broken weights are not kept, and the run continues as if neither had been.
    checkpoints = killed.run_dir / "checkpoints"
    damaged = int((checkpoints / "latest").read_text().removeprefix("step-"))
    step = damaged - 2
    _flip_a_bit(checkpoints / f"step-{damaged:08d}" / "policy" / "__0_0.distcp")
    steps = (*_SAVED, f"schedule.total_steps={damaged}")
    whole = start_trainer(*steps, name="whole")
    broken = start_trainer(*steps, "policy.optimizer.lr=1e30", name="killed")
    assert broken.wait() == 1, broken.output
    said = " ".join(broken.output.split())
    assert f"step-{damaged:08d} cannot be used: the content of policy/__0_0.distcp" in said
    assert f"resuming after step {step} (" in said
    assert "the update left weights with which log-probabilities are not finite (gradient " in said
    assert f"The last good checkpoint is {checkpoints}/step-{step:08d}: start again" in said
    assert "Traceback" not in broken.output
    resumed = start_trainer(*steps, name="killed")
    assert resumed.wait() == 0, resumed.output
    assert f"resuming after step {step} (" in resumed.output
    assert whole.wait() == 0, whole.output
    assert resumed.curve() == whole.curve()
    for one, two in zip(whole.metrics(), resumed.metrics(), strict=True):
        if one["step"]:
            assert one["actor/loss"] == pytest.approx(two["actor/loss"], abs=1e-4)
    ids = [
        [sample["ids"] for line in t.trajectories() for sample in line["samples"]]
        for t in (whole, resumed)
    ]
    assert ids[0] == ids[1]

    (killed.run_dir / "server_token").write_text(
        "of an attempt that was killed after its last step"
    )
    finished = start_trainer(*steps, name="killed")
    assert finished.wait() == 0, finished.output
    assert f"nothing to train: step {damaged} has been reached" in finished.output
    assert not (killed.run_dir / "server_token").exists()


def _flip_a_bit(path: Path) -> None:
    """Flips a bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _stranger_is_refused(trainer: Trainer) -> None:
    """Calls the run's server as any other program of this machine can."""
    log = (trainer.run_dir / "logs" / "rollout-0.log").read_text(encoding="utf-8")
    (address,) = re.findall(r"serves at (127\.0\.0\.1:\d+)", log)
    methods = ("WeightSyncService/BeginUpdate", "ServerService/Pause")
    with grpc.insecure_channel(address) as channel:
        for method in methods:
            call: Callable[..., object] = channel.unary_unary(f"/treadle.rollout.v1.{method}")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def _await_end(pidfd: int) -> None:
    """Waits for the end of a process that is not a child of this one."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    os.close(pidfd)


def test_a_run_continues_without_a_dead_server_until_none_is_left(
    start_trainer: StartTrainer,
) -> None:
    trainer = start_trainer(
        _ENDLESS,
        *_UNVALIDATED,
        *("rollout.num_replicas=2", "rollout.max_restarts=0", "policy.backend=fake"),
    )
    trainer.read_until(" 1/1000")
    os.kill(trainer.pid_of("rollout-0"), signal.SIGKILL)
    trainer.read_until("rollout server lost: rollout-0")
    trainer.read_until("/1000")
    os.kill(trainer.pid_of("rollout-1"), signal.SIGKILL)
    assert trainer.wait() == 1
    assert "no rollout server is left" in trainer.output
    for name in ("rollout-0", "rollout-1"):
        assert re.search(rf"{name} \(127\.0\.0\.1:\d+\) was ended by SIGKILL", trainer.output)
    steps = [line for line in trainer.metrics() if line["step"]]
    assert [line["rollout/num_failed"] for line in steps] == [0] * len(steps)


def test_the_only_server_is_started_again_and_an_interrupt_ends_everything(
    start_trainer: StartTrainer,
) -> None:
    trainer = start_trainer(_ENDLESS, *_UNVALIDATED, "policy.backend=fake")
    trainer.read_until(" 2/1000")
    os.kill(trainer.pid_of("rollout-0"), signal.SIGKILL)
    trainer.read_until("started again: rollout-0")
    for _ in range(2):  # The second line belongs to a step that began after the restart.
        trainer.read_until("/1000")
    server = os.pidfd_open(trainer.pid_of("rollout-0-restart-1"))
    trainer.process.send_signal(signal.SIGINT)
    assert trainer.wait() == 130, trainer.output
    assert f"to resume: run.dir={trainer.run_dir}" in trainer.output
    assert "Traceback" not in trainer.output
    # Its last step is saved, though no number of steps was to be.
    last = trainer.metrics()[-1]["step"]
    assert (trainer.run_dir / "checkpoints/latest").read_text().strip() == f"step-{last:08d}"
    assert f"step {last} is saved" in trainer.output
    assert '"state":"interrupted"' in trainer.page()
    _await_end(server)
    # The server that was started again sampled with the present weights.
    for line in trainer.trajectories():
        for sample in line["samples"]:
            sampled = [span for span in sample["spans"] if span["origin"] == "sampled"]
            assert {span["weight_version"] for span in sampled} == {line["step"] - 1}
