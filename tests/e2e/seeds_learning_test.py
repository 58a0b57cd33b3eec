"""Other seeds learn as the default one does; CI runs them while there is time."""

from collections.abc import Callable

import pytest

from .testing import Trainer

pytestmark = pytest.mark.timeout(1200)
Train = Callable[..., Trainer]


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_rise_too(train: Train, seed: int) -> None:
    trainer = train(f"run.seed={seed}", "schedule.total_steps=24", base=())
    assert trainer.mean("tool/call_rate", range(1, 6)) <= 0.65
    assert trainer.mean("tool/call_rate", range(20, 25)) >= 0.9
    assert trainer.mean("val/reward", [24]) >= 0.95
