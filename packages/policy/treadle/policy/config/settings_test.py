import json
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.policy.config.algorithm import AlgorithmConfig, RewardKlConfig
from treadle.policy.config.base import Section
from treadle.policy.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from treadle.policy.config.settings import from_json, to_json


@pytest.mark.parametrize(
    "section",
    [
        AlgorithmConfig(),
        AlgorithmConfig(
            loss="losses.py:mine",
            loss_args={"at": [1, 0.1, None]},
            clip_dual=None,
            reward_kl=RewardKlConfig(coef=0.1),
        ),
        PolicyConfig(
            parallel=ParallelConfig(tensor=2, sequence=True),
            lora=LoraConfig(rank=4, path=Path("/adapter"), targets=("q_proj",)),
        ),
    ],
)
def test_settings_that_travel_are_equal(section: Section) -> None:
    assert from_json(type(section), to_json(section)) == section


def test_what_is_the_default_does_not_travel() -> None:
    assert to_json(PolicyConfig()) == "{}"


@pytest.mark.parametrize("unknown", [{"later": 1}, {"reward_kl": {"later": 1}}])
def test_a_key_of_another_version_is_refused_by_its_name(unknown: dict[str, object]) -> None:
    with pytest.raises(SetupError, match=r"AlgorithmConfig (reward_kl\.)?later: .*not permitted"):
        from_json(AlgorithmConfig, json.dumps(unknown))
