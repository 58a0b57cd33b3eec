"""A LangGraph agent learns: the math expression example, by the numbers it leaves."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import pytest

from .conftest import SMALL, Trainer

Train = Callable[..., Trainer]

_CONFIG = Path(__file__).parents[2] / "examples" / "math_expression" / "config.yaml"


def _mean(trainer: Trainer, name: str, steps: Sequence[int]) -> float:
    by_step = {line["step"]: line for line in trainer.metrics()}
    return fmean(by_step[step][name] for step in steps)


def test_a_few_steps_go_through_the_graph(train: Train) -> None:
    trainer = train(f"--config={_CONFIG}", *SMALL, base=())
    _, *steps = trainer.metrics()
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["rollout/num_trajectories"] == 16
        assert line["rollout/num_failed"] == 0
        assert line["rollout/logprob_diff_max"] < 1e-3
        assert line["rollout/turns"] > 2
    for trajectory in trainer.trajectories():
        roles = [message["role"] for message in trajectory["messages"]]
        num_calls = roles.count("tool")
        assert roles == ["system", "user", *["assistant", "tool"] * num_calls, "assistant"]
        assert trajectory["num_turns"] == 2 + 2 * num_calls


@pytest.mark.timeout(1200)
def test_the_example_learns_to_compute_to_the_end(train: Train) -> None:
    trainer = train(f"--config={_CONFIG}", "schedule.total_steps=24", base=())
    first, last = range(1, 6), range(20, 25)
    assert _mean(trainer, "reward/mean", first) <= 0.55
    assert _mean(trainer, "reward/mean", last) >= 0.7
    assert _mean(trainer, "rollout/turns", first) <= 4.5
    assert _mean(trainer, "rollout/turns", last) >= 5.2
    assert _mean(trainer, "val/accuracy", [0]) <= 0.6
    assert _mean(trainer, "val/accuracy", [24]) >= 0.7
    assert _mean(trainer, "rollout/num_failed", range(1, 25)) == 0
