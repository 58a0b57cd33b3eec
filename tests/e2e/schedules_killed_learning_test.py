"""Runs that are killed at random moments, with every schedule that samples beside training."""

import contextlib
import random
import subprocess

import pytest

from .testing import StartTrainer, trained_rows

pytestmark = pytest.mark.timeout(1200)
_KILLS = 2
_PROMPTS, _SAMPLES, _STEPS = 4, 4, 14
"""Far more steps than the killed processes take, or one would end before it is killed."""


@pytest.mark.parametrize("kind", ["overlap", "stream", "async"])
def test_every_row_is_trained_on_once(start_trainer: StartTrainer, kind: str) -> None:
    arguments = (
        f"schedule.kind={kind}",
        f"schedule.total_steps={_STEPS}",
        "schedule.save_every=2",
        "schedule.save_hf=never",
        "schedule.val_every=null",
        "schedule.val_before_train=false",
        "data.shuffle=false",
        "rollout.name=fake",
        "sync.in_flight=continue",
    )
    moments = random.Random(kind)
    for _ in range(_KILLS):
        killed = start_trainer(*arguments)
        for _ in range(moments.randint(1, 3)):
            killed.read_until(f"/{_STEPS}")  # a step
        with contextlib.suppress(subprocess.TimeoutExpired):
            killed.process.wait(moments.uniform(0, 0.4))
        killed.process.kill()
        killed.process.wait()
    last = start_trainer(*arguments)
    assert last.wait() == 0, last.output
    rows = range(_STEPS * _PROMPTS)
    assert trained_rows(last) == {f"train/{row}": _SAMPLES for row in rows}
    steps = [line["step"] for line in last.metrics() if line["step"]]
    assert steps == list(range(1, _STEPS + 1))
    assert not list((last.run_dir / "groups").iterdir())
