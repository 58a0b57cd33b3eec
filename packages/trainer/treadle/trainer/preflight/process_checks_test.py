"""Tests of the checks of processes that need no whole run; see `check_test.py` for the others."""

import pytest

from treadle.agent_loop import function_tool
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.own_code import NOTHING, OwnCode
from treadle.trainer.preflight.process_checks import check_estimator, check_workers


def _config(workers: int) -> Config:
    given = ["model.path=/m", "data.train_files=/t.jsonl", f"agent.num_workers={workers}"]
    return load_config([], given).config


@function_tool
def lookup(word: str) -> str:
    """Looks up a word."""
    return word


def test_objects_of_a_script_cannot_reach_workers() -> None:
    own = OwnCode(reward=lambda _: 0.0, tools={"lookup": lookup})
    check_workers(_config(0), own)
    check_workers(_config(2), NOTHING)
    with pytest.raises(ConfigError, match=r"agent.num_workers=2 .* the reward, the tool 'lookup'"):
        check_workers(_config(2), own)


def test_a_row_needs_trajectories_to_compare() -> None:
    config = Config.model_validate(
        {
            "model": {"path": "/m"},
            "data": {"train_files": ["/t.jsonl"]},
            "algorithm": {"advantage": "maxrl"},
            "rollout": {"samples_per_prompt": 1},
        }
    )
    with pytest.raises(Exception, match=r"maxrl compares .*samples_per_prompt=1: set at least 2"):
        check_estimator(config)
