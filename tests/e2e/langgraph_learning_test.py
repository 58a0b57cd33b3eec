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


@pytest.mark.timeout(900)
def test_the_example_learns_to_compute_to_the_end(train: Train) -> None:
    trainer = train(f"--config={_CONFIG}", base=())
    assert _mean(trainer, "reward/mean", range(1, 6)) <= 0.7
    assert _mean(trainer, "reward/mean", range(31, 41)) >= 0.9
    assert _mean(trainer, "val/accuracy", [0]) <= 0.8
    assert _mean(trainer, "val/accuracy", [40]) >= 0.95
    assert _mean(trainer, "rollout/turns", range(31, 41)) > _mean(
        trainer, "rollout/turns", range(1, 6)
    )
