"""Runs that are killed at random places of a step, with every schedule.

The last process of each runs its agent loops on two workers, of which one is killed too.
"""

import os
import random
import signal

import pytest

from .testing import StartTrainer, trained_rows

pytestmark = pytest.mark.timeout(1200)
_PROMPTS, _SAMPLES, _STEPS = 4, 4, 12
"""Far more steps than the killed processes take, or one would end before it is killed."""


@pytest.mark.parametrize(
    ("kind", "kills"), [("sync", 1), ("overlap", 2), ("stream", 2), ("async", 2)]
)
def test_every_row_is_trained_on_once(start_trainer: StartTrainer, kind: str, kills: int) -> None:
    arguments = (
        f"schedule.kind={kind}",
        f"schedule.total_steps={_STEPS}",
        "schedule.save_every=2",
        "schedule.save_hf=never",
        f"schedule.val_every={_STEPS}",
        "schedule.val_before_train=false",
        "algorithm.correction.weights=token",
        "data.shuffle=false",
        "rollout.name=fake",
        "sync.in_flight=continue",
    )
    places = random.Random(kind)
    for _ in range(kills):
        killed = start_trainer(*arguments)
        for _ in range(places.randint(1, 2)):
            killed.read_until(f"/{_STEPS}")  # a step
        killed.kill_in_a_step(f"/{_STEPS}", places.random())
    last = start_trainer(*arguments, "agent.num_workers=2")
    last.read_until(f"/{_STEPS}")
    os.kill(last.pid_of("worker-0"), signal.SIGKILL)
    assert last.wait() == 0, last.output
    rows = range(_STEPS * _PROMPTS)
    assert trained_rows(last) == {f"train/{row}": _SAMPLES for row in rows}
    lines = [line for line in last.metrics() if line["step"]]
    assert [line["step"] for line in lines] == list(range(1, _STEPS + 1))
    assert all(line["rollout/num_failed"] == 0 for line in lines)
    assert lines[-1]["val/num_failed"] == 0
    assert not list((last.run_dir / "groups").glob("*"))
    on_workers = [line for line in lines if "workers/live" in line]
    assert sum(line["workers/lost"] for line in on_workers) == 1
    for line in on_workers[1:]:
        shares = [line[name] for name in line if name.startswith("servers/time_share/")]
        assert sum(shares) == pytest.approx(1.0)
    waited = [line["servers/time_share/tools"] for line in on_workers[1:]]
    assert max(waited) > 0.0, "of the calculator's turns the router tells"
