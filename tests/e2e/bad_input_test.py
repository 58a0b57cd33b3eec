"""Bad input that only a started run can detect: one message, and an unchanged run directory."""

import contextlib
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .testing import StartTrainer, Trainer

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


def test_a_run_directory_belongs_to_one_trainer_and_one_run(start_trainer: StartTrainer) -> None:
    first = start_trainer(*_ONE_STEP)
    first.read_until("run directory")
    first.process.send_signal(signal.SIGSTOP)  # It must not end before the second one starts.
    said = _end(start_trainer(*_ONE_STEP), 2)
    first.process.send_signal(signal.SIGCONT)
    assert f"is in use by another trainer (pid {first.process.pid})" in said
    _end(first, 0)
    kept = first.metrics()
    assert "run.seed was 0 and is 5" in _end(start_trainer(*_ONE_STEP, "run.seed=5"), 2)
    assert "already holds a run" in _end(start_trainer(*_ONE_STEP, "run.resume=never"), 2)
    assert "kept no checkpoint to go on from" in _end(start_trainer(*_ONE_STEP), 2)
    assert first.metrics() == kept


def test_a_full_disk_ends_the_run_and_the_previous_checkpoint_stays(
    start_trainer: StartTrainer,
) -> None:
    every = "schedule.save_every=1"
    _end(start_trainer(*_ONE_STEP, every, name="full"), 0)
    with _files_of_at_most(4 << 20):  # a checkpoint is larger, everything else is smaller
        trainer = start_trainer(*_ONE_STEP, every, "schedule.total_steps=2", name="full")
    said = _end(trainer, 2)
    assert f"cannot write {trainer.run_dir / 'checkpoints'}" in said
    assert "MiB are free there" in said
    checkpoints = trainer.run_dir / "checkpoints"
    assert (checkpoints / "latest").read_text() == "step-00000001\n"
    assert (checkpoints / "step-00000001" / "state.json").exists()
    assert [line["step"] for line in trainer.metrics()] == [1]


def test_an_error_in_the_users_reward_is_told_with_file_and_line(
    start_trainer: StartTrainer, tmp_path: Path
) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text("def score(trajectory):\n    return undefined_name\n")
    trainer = start_trainer(*_ONE_STEP, f"reward.name={reward}:score")
    said = _end(trainer, 1)
    assert f'File "{reward}", line 2, in score\n    return undefined_name' in said
    last = said[said.rindex("error: none of") :]
    assert f"NameError: name 'undefined_name' is not defined ({reward}:2, in score)" in last
    log = (trainer.run_dir / "logs" / "trainer.log").read_text()
    assert "the run failed: none of" in log
    assert "    return undefined_name" in log
    record = json.loads((trainer.run_dir / "trajectories.jsonl").read_text().splitlines()[0])
    assert "return undefined_name" in record["traceback"]
    assert "return undefined_name" in (trainer.run_dir / "report.html").read_text()


@contextlib.contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """Limits the size of files that processes started inside, and their children, can write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
