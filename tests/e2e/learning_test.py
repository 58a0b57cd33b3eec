"""The default run learns: what the README promises of it, by the numbers it leaves."""

from collections.abc import Callable, Sequence
from statistics import fmean

import pytest

from .conftest import Trainer

pytestmark = pytest.mark.timeout(1200)
Train = Callable[..., Trainer]


def _mean(trainer: Trainer, name: str, steps: Sequence[int]) -> float:
    by_step = {line["step"]: line for line in trainer.metrics()}
    return fmean(by_step[step][name] for step in steps)


def test_the_default_run_learns_to_use_the_tool(train: Train) -> None:
    trainer = train(base=())
    assert _mean(trainer, "tool/call_rate", range(1, 6)) <= 0.65
    assert _mean(trainer, "tool/call_rate", range(31, 41)) >= 0.98
    assert _mean(trainer, "reward/mean", range(31, 41)) >= 0.9
    assert _mean(trainer, "val/accuracy", [0]) <= 0.75
    assert _mean(trainer, "val/accuracy", [40]) >= 0.95


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_rise_too(train: Train, seed: int) -> None:
    trainer = train(f"run.seed={seed}", "schedule.total_steps=24", base=())
    assert _mean(trainer, "tool/call_rate", range(1, 6)) <= 0.65
    assert _mean(trainer, "tool/call_rate", range(20, 25)) >= 0.9
    assert _mean(trainer, "val/accuracy", [24]) >= 0.95
