"""The default run learns what the README promises, by its metrics."""

from collections.abc import Callable

import pytest

from .testing import Trainer

pytestmark = pytest.mark.timeout(1200)
Train = Callable[..., Trainer]


def test_the_default_run_learns_to_use_the_tool(train: Train) -> None:
    trainer = train(base=())
    assert trainer.mean("tool/call_rate", range(1, 6)) <= 0.65
    assert trainer.mean("tool/call_rate", range(31, 41)) >= 0.98
    assert trainer.mean("reward/mean", range(31, 41)) >= 0.9
    assert trainer.mean("val/accuracy", [0]) <= 0.75
    assert trainer.mean("val/accuracy", [40]) >= 0.95
