from pathlib import Path

import pytest

from math_expression.dataset import AGENT_NAME
from multi_trajectory.compaction import CompactingAgent
from treadle.agent_loop import default_loops
from treadle.trainer.config.load import load_config

EXAMPLES = Path(__file__).parents[1]


@pytest.mark.parametrize("files", [["config.yaml"], ["config.yaml", "gpu.yaml"]])
def test_the_rows_run_in_a_compacting_loop(files: list[str]) -> None:
    config = load_config([EXAMPLES / "multi_trajectory" / file for file in files], []).config
    assert all(path.exists() for path in (*config.data.train_files, *config.data.val_files))
    loops = default_loops().adding(AGENT_NAME, config.agent.loops[AGENT_NAME])
    assert isinstance(loops.resolve(AGENT_NAME), CompactingAgent)


@pytest.mark.parametrize("example", ["math_expression", "multi_trajectory", "train_existing_agent"])
def test_a_layer_makes_a_run_of_eight_gpus(example: str) -> None:
    files = [EXAMPLES / example / file for file in ("config.yaml", "gpu.yaml")]
    config = load_config(files, []).config
    assert config.policy.parallel.data == config.rollout.num_replicas == 8
    assert config.rollout.name == "vllm"
    assert config.rollout.release_memory
    assert config.policy.dtype == "bfloat16"
