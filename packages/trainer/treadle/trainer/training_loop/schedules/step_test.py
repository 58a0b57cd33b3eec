"""Which checkpoint is the best, and when a run ends early; whole steps are in tests/e2e."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from treadle.trainer.checkpoint.run_directory import Best, Checkpoints, RunDirectoryError
from treadle.trainer.config.launch import LocalLaunchConfig
from treadle.trainer.config.schema import ScheduleConfig, check_max_failures
from treadle.trainer.training_loop.schedules.step import _choose_best, steps_of


async def _write_policy(directory: Path) -> None:
    await asyncio.to_thread((directory / "policy").mkdir)


class Run:
    """A run whose validations have these rewards, as far as it comes."""

    def __init__(self, directory: Path, *, keep: int = 1, **schedule: object) -> None:
        self.notes: list[str] = []
        given = {"val_every": 2, "best": "val/reward", **schedule}
        self.context: Any = SimpleNamespace(
            config=SimpleNamespace(schedule=ScheduleConfig.model_validate(given)),
            checkpoints=Checkpoints(directory, keep=keep),
            record=SimpleNamespace(note=lambda step, text: self.notes.append(f"{step}: {text}")),
            total_steps=12,
        )

    def train(self, rewards: dict[int, float], *, first_step: int = 1, stop: int = 99) -> int:
        """Returns the last step."""
        step, schedule = first_step - 1, self.context.config.schedule
        self.context.checkpoints.choose_best(schedule.best, until=step)
        for step in steps_of(self.context, first_step):
            last = step == self.context.total_steps
            if schedule.saves(step, last=last):
                metrics = {"val/reward": rewards[step]}
                asyncio.run(self.context.checkpoints.save(step, metrics, _write_policy))
                _choose_best(self.context, step, metrics)
            if step == stop:
                break
        return step


def test_the_best_checkpoint_is_kept_and_stands_for_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.train({2: 0.1, 4: 0.7, 6: 0.7, 8: 0.2, 10: 0.3, 12: 0.4}) == 12
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.steps() == (4, 12)
    assert checkpoints.best == Best(step=4, value=0.7)
    assert (chosen := checkpoints.chosen()) is not None
    assert chosen.step == 4
    assert (latest := checkpoints.newest_whole().checkpoint) is not None
    assert latest.step == 12, "which a resume continues with"
    Run(tmp_path, best=None).train({}, first_step=13)
    assert (chosen := checkpoints.chosen()) is not None
    assert chosen.step == 12, "a run that does not choose any more"
    checkpoints.set_best(Best(step=5, value=1.0))
    with pytest.raises(RunDirectoryError, match="no checkpoint of step 5"):
        checkpoints.chosen()


def test_a_run_without_a_better_validation_ends_early_and_stays_ended(tmp_path: Path) -> None:
    rewards = {2: 0.5, 4: 0.4, 6: 0.5, 8: 0.9}
    run = Run(tmp_path, patience=2)
    assert run.train(rewards, stop=5) == 5
    run = Run(tmp_path, patience=2)
    assert run.train(rewards, first_step=5) == 6
    text = "6: the run ends early: no validation since step 2, with val/reward=0.5, was better"
    assert run.notes == [f"{text} (schedule.patience=2)"]
    assert Run(tmp_path, patience=2).train(rewards, first_step=7) == 6
    assert Run(tmp_path, patience=3).train(rewards, first_step=7, stop=8) == 8


def test_a_run_that_was_set_back_chooses_again(tmp_path: Path) -> None:
    Run(tmp_path, keep=3).train({2: 0.5, 4: 0.9, 6: 0.6}, stop=6)
    run = Run(tmp_path, keep=3, val_every=3)
    run.context.checkpoints.set_back(2)
    run.context.checkpoints.choose_best("val/reward", until=2)
    assert run.context.checkpoints.best == Best(step=2, value=0.5)
    assert run.context.checkpoints.steps() == (2, 4, 6), "which it may be set forth to again"
    run.train({3: 0.4, 6: 0.45}, first_step=3, stop=6)
    assert run.context.checkpoints.steps() == (2, 3, 6)
    run.context.checkpoints.choose_best("val/reward", until=6)
    assert run.context.checkpoints.best == Best(step=2, value=0.5), "not step 4, long abandoned"


def test_a_run_that_opens_compares_by_its_metric_what_it_has_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step, reward, right in ((2, 0.9, 0.1), (4, 0.2, 0.4), (6, 0.1, 0.2)):
        metrics = {"val/reward": reward, "val/accuracy": right}
        asyncio.run(checkpoints.save(step, metrics, _write_policy))  # and dies before it chooses
    for metric, best in (
        ("val/reward", Best(step=2, value=0.9)),
        ("val/accuracy", Best(step=4, value=0.4)),
        (None, None),
    ):
        checkpoints.choose_best(metric, until=6)
        assert checkpoints.best == best
    (tmp_path / "step-00000002" / "state.json").write_text("{")
    checkpoints.choose_best("val/reward", until=6)
    assert checkpoints.best == Best(step=4, value=0.2), "the other is damaged"


def test_best_alone_leaves_checkpoints_that_a_run_resumes_from(tmp_path: Path) -> None:
    alone = {"val_every": 2, "best": "val/reward", "save_last": False, "save_minutes": None}
    schedule = ScheduleConfig.model_validate(alone)
    kept = "with each validation and when interrupted; the greatest val/reward is kept"
    assert schedule.when_saved() == kept
    assert schedule.keeps_checkpoints
    check_max_failures(LocalLaunchConfig(max_failures=1), schedule)
    never = ScheduleConfig.model_validate({**alone, "best": None})
    assert never.when_saved() == "never: the trained model will be lost"
    with pytest.raises(ValueError, match="resumes from a checkpoint"):
        check_max_failures(LocalLaunchConfig(max_failures=1), never)


def test_a_best_that_is_not_measured_is_noted(tmp_path: Path) -> None:
    run = Run(tmp_path, best="val/accuracy")
    _choose_best(run.context, 2, {"val/reward": 0.5})
    assert "do not tell right from wrong" in run.notes[0]
    for wrong in ({"val_every": None}, {"best": None, "patience": 2}):
        with pytest.raises(ValidationError, match=r"set (val_every|best=val/reward)"):
            Run(tmp_path, **wrong)
