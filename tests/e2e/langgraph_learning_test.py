"""A LangGraph agent learns: the math expression example, by the numbers it leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest
from draw_curve import draw

from treadle.trainer.report.metrics import read_metrics

from .testing import Trainer

Train = Callable[..., Trainer]

_STEPS = 16
_CONFIG = Path(__file__).parents[2] / "examples" / "math_expression" / "config.yaml"


@pytest.mark.timeout(1200)
def test_the_example_learns_to_compute_to_the_end(train: Train, tmp_path: Path) -> None:
    trainer = train(
        f"--config={_CONFIG}",
        f"schedule.total_steps={_STEPS}",
        f"schedule.val_every={_STEPS}",
        base=(),
    )
    first, last = range(1, 5), range(_STEPS - 4, _STEPS + 1)
    assert trainer.mean("reward/mean", first) <= 0.5
    assert trainer.mean("reward/mean", last) >= 0.63
    assert trainer.mean("rollout/turns", first) <= 4.5
    assert trainer.mean("rollout/turns", last) >= 5.2
    assert trainer.mean("val/reward", [0]) <= 0.5
    assert trainer.mean("val/reward", [_STEPS]) >= 0.63
    assert trainer.mean("rollout/num_failed", range(1, _STEPS + 1)) == 0
    for line in trainer.metrics():
        assert line.get("rollout/logprob_diff_max", 0) < 1e-3
    for trajectory in trainer.trajectories():
        roles = [message["role"] for message in trajectory["messages"]]
        num_calls = roles.count("tool")
        assert roles == ["system", "user", *["assistant", "tool"] * num_calls, "assistant"]
        assert trajectory["num_turns"] == 2 + 2 * num_calls
    draw(read_metrics(trainer.run_dir / "metrics.jsonl"), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0
