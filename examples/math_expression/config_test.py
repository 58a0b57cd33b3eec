from pathlib import Path

from math_expression.dataset import AGENT_NAME
from math_expression.recipe import CATALOGUE
from treadle.agent_loop import default_loops
from treadle.agent_loop.langgraph import ReactAgentLoop
from treadle.trainer.config.load import load_config

HERE = Path(__file__).parent


def test_the_configuration_names_the_demo_and_the_graph() -> None:
    config = load_config([HERE / "config.yaml"], []).config
    assert config.agent.tool_catalogue is not None
    assert config.agent.tool_catalogue.resolve() == CATALOGUE
    files = [config.model.path, *config.data.train_files, *config.data.val_files]
    assert all(path.resolve().is_relative_to(CATALOGUE.parent) for path in files)
    assert all(path.exists() for path in files)
    loops = default_loops().adding(AGENT_NAME, config.agent.loops[AGENT_NAME])
    assert isinstance(loops.resolve(AGENT_NAME), ReactAgentLoop)
