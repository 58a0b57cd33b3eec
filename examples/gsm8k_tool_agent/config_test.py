from pathlib import Path

import pytest

from treadle.tools import Gsm8kTool, load_catalogue
from treadle.trainer.config.load import load_config
from treadle.trainer.config.topology import make_topology

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["config.yaml", "tiny.yaml"])
def test_the_configurations_are_valid_and_name_files_of_the_example(name: str) -> None:
    config = load_config([HERE / name], []).config
    assert config.agent.tool_catalogue == HERE / "tools.yaml"
    assert config.data.train_files == (HERE / "data" / "train.parquet",)
    assert config.reward.name == "gsm8k"


def test_another_engine_is_a_layer_on_top() -> None:
    config = load_config([HERE / "config.yaml", HERE / "vllm.yaml"], []).config
    assert config.rollout.name == "vllm"
    assert config.rollout.samples_per_prompt == 16
    topology = make_topology(config.launch, config.policy, config.rollout)
    assert topology is not None
    assert [devices.indices for devices in topology.ranks] == [(0,), (1,), (2,), (3,)]
    assert [devices.indices for devices in topology.servers] == [(4, 5), (6, 7)]


def test_a_single_turn_is_a_layer_on_top() -> None:
    config = load_config([HERE / "tiny.yaml", HERE / "single_turn.yaml"], []).config
    assert config.agent.tool_catalogue is None
    assert config.data.train_files == (HERE / "data_single_turn" / "train.parquet",)


def test_the_catalogue_is_verls_tool_word_for_word() -> None:
    (tool,) = load_catalogue(HERE / "tools.yaml").values()
    assert tool.spec == Gsm8kTool().spec
