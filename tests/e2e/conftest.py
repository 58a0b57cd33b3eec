"""Starts the trainer for a test, and ends it with the test."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from .testing import SMALL, StartTrainer, Trainer


@pytest.fixture
def start_trainer(tmp_path: Path) -> Iterator[StartTrainer]:
    """Starts the trainer, by default with the small demo, in a directory under `tmp_path`."""
    started: list[Trainer] = []

    def start(*arguments: str, name: str = "run", base: Sequence[str] = SMALL) -> Trainer:
        trainer = Trainer(tmp_path / name, [*base, *arguments])
        started.append(trainer)
        return trainer

    yield start
    for trainer in started:
        if trainer.process.poll() is None:
            trainer.process.kill()
        trainer.process.wait()
        assert trainer.process.stdout is not None
        trainer.process.stdout.close()


@pytest.fixture
def train(start_trainer: StartTrainer) -> Callable[..., Trainer]:
    """Runs the trainer to its end, which must be a success."""

    def run(*arguments: str, name: str = "run", base: Sequence[str] = SMALL) -> Trainer:
        trainer = start_trainer(*arguments, name=name, base=base)
        status = trainer.wait()
        assert status == 0, trainer.output
        return trainer

    return run
