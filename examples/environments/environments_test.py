"""The example's environment, and its files as a run checks them."""

from pathlib import Path

import pytest

from treadle.trainer.config.load import load_config
from treadle.trainer.preflight import check_run

_HERE = Path(__file__).parent


def test_the_tiny_run_can_start() -> None:
    config = load_config([_HERE / "tiny.yaml"], []).config
    checked = check_run(config, Path("/nowhere"))
    assert checked.plan.total_steps == 30
    assert len(checked.inputs.train) == 64
    assert (
        dict(checked.plan.rows())["reward"] == "what the agent loop or its tools give, for all rows"
    )


@pytest.mark.parametrize(
    ("guesses", "reward"), [(["It is 7"], 1.0), (["1", "9", "7"], 0.5), (["?"] * 4, 0.0)]
)
def test_guessing_earlier_is_worth_more(guesses: list[str], reward: float) -> None:
    from environments.guess import Guess

    game = Guess(highest=9, tries=4)
    seed = next(s for s in range(100) if game.reset(seed=s) and game._number == 7)
    game.reset(seed=seed)
    steps = [game.step(guess) for guess in guesses]
    assert sum(step[1] for step in steps) == reward
    assert steps[-1][2] or steps[-1][3]
