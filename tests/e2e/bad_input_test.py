"""Bad input that only a started run can detect: one message, and an unchanged run directory."""

import json
import resource
import signal
from pathlib import Path

import pytest
import transformers  # noqa: F401  # before a check in this process keeps torch out of it

from treadle.trainer.main import main

from .testing import SMALL, StartTrainer, Trainer

pytestmark = pytest.mark.timeout(600)

_ONE_STEP = (
    "schedule.total_steps=1",
    "schedule.val_every=null",
    "schedule.val_before_train=false",
    "schedule.save_last=false",
)


def _end(trainer: Trainer, status: int) -> str:
    assert trainer.wait() == status, trainer.output
    assert "Traceback" not in trainer.output
    return trainer.output


def test_a_run_directory_belongs_to_one_trainer_and_one_run_and_may_be_full(
    start_trainer: StartTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*SMALL, *_ONE_STEP, "schedule.save_every=1", "schedule.total_steps=1000")

    def refused(*arguments: str) -> str:
        """Starts another trainer in this process, which must refuse before it starts others."""
        assert main([f"run.dir={trainer.run_dir}", *settings, *arguments]) == 2
        return capsys.readouterr().err

    trainer = start_trainer(*settings, base=())
    trainer.read_until("1/1000")
    trainer.process.send_signal(signal.SIGSTOP)  # It must not end before the second one starts.
    said = refused()
    assert f"is in use by another trainer (pid {trainer.process.pid})" in said

    # What ends the run leaves the checkpoint before.
    for name in ("policy-0", None):  # a checkpoint is larger, everything else is smaller
        pid = trainer.process.pid if name is None else trainer.pid_of(name)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    trainer.process.send_signal(signal.SIGCONT)
    said = _end(trainer, 2)
    checkpoints = trainer.run_dir / "checkpoints"
    assert f"cannot write {checkpoints}" in said
    assert "MiB are free there" in said
    kept = trainer.metrics()
    last = kept[-1]["step"]
    assert (checkpoints / "latest").read_text() == f"step-{last:08d}\n"
    assert (checkpoints / f"step-{last:08d}" / "state.json").exists()

    assert "run.seed was 0 and is 5" in refused("run.seed=5")
    assert "already holds a run" in refused("run.resume=never")
    assert trainer.metrics() == kept


def test_an_error_in_the_users_reward_is_told_with_file_and_line(
    start_trainer: StartTrainer, tmp_path: Path
) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text("def score(trajectory):\n    return undefined_name\n")
    own = (*_ONE_STEP, f"reward.name={reward}:score", "policy.backend=fake")
    trainer = start_trainer(*own, "agent.try_once=false")
    said = _end(trainer, 1)
    assert f'File "{reward}", line 2, in score\n    return undefined_name' in said
    last = said[said.rindex("error: step 1: ") :]
    assert f"NameError: name 'undefined_name' is not defined ({reward}:2, in score)" in last
    log = (trainer.run_dir / "logs" / "trainer.log").read_text()
    assert "the run failed: step 1: " in log
    assert "    return undefined_name" in log
    record = json.loads((trainer.run_dir / "trajectories.jsonl").read_text().splitlines()[0])
    assert "return undefined_name" in record["traceback"]
    assert "return undefined_name" in (trainer.run_dir / "report.html").read_text()
