"""Input that only a started run finds bad: one message, and the run directory as it was."""

import pytest

from .conftest import StartTrainer, Trainer

pytestmark = pytest.mark.timeout(180)

_ONE_STEP = ("schedule.total_steps=1", "schedule.val_every=null", "schedule.val_before_train=false")


def _end(trainer: Trainer, status: int) -> str:
    assert trainer.wait() == status, trainer.output
    assert "Traceback" not in trainer.output
    return trainer.output


def test_a_run_directory_belongs_to_one_trainer_and_one_run(start_trainer: StartTrainer) -> None:
    first = start_trainer(*_ONE_STEP)
    first.read_until("run directory")
    said = _end(start_trainer(*_ONE_STEP), 2)
    assert f"is in use by another trainer (pid {first.process.pid})" in said
    _end(first, 0)
    kept = first.metrics()
    assert "run.seed was 0 and is 5" in _end(start_trainer(*_ONE_STEP, "run.seed=5"), 2)
    assert "already holds a run" in _end(start_trainer(*_ONE_STEP, "run.resume=never"), 2)
    assert first.metrics() == kept


def test_a_checkpoint_that_cannot_be_written_ends_the_run(start_trainer: StartTrainer) -> None:
    trainer = start_trainer(*_ONE_STEP, "schedule.save_every=1", name="full")
    trainer.read_until("run directory")
    (trainer.run_dir / "checkpoints").write_text("not a directory")
    said = _end(trainer, 2)
    assert "the checkpoint of step 1 cannot be written" in said


def test_a_model_of_another_kind_is_named(start_trainer: StartTrainer) -> None:
    trainer = start_trainer(*_ONE_STEP, "policy.parallel.tensor=3", name="kind")
    said = _end(trainer, 2)
    assert "3" in said
