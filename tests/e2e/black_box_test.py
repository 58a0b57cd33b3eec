"""The main job with a black-box agent: OpenAI's client, the endpoint, servers, trainer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .testing import SMALL, Trainer

pytestmark = pytest.mark.timeout(600)
EXAMPLES = Path(__file__).parents[2] / "examples"
Train = Callable[..., Trainer]


def test_an_agent_that_knows_nothing_of_us_is_trained(train: Train) -> None:
    config = EXAMPLES / "train_existing_agent" / "config.yaml"
    trainer = train(base=["--config", str(config), *SMALL])
    for line in trainer.metrics()[1:]:
        assert line["rollout/num_failed"] == 0
        assert line["rollout/num_trajectories"] == 16
        assert line["rollout/logprob_diff_max"] < 1e-3
        assert line["capture/fork"] == 0
        assert line["capture/exact"] > 0
        assert line["proxy/agent_crashes"] == 0
