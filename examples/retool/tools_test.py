from pathlib import Path

import pytest

from treadle.tools import load_catalogue
from treadle.tools.code_interpreter import SPEC, RetoolCodeInterpreterTool

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["tools.yaml", "tools_local.yaml"])
def test_the_catalogues_are_the_recipes_tool(name: str) -> None:
    (tool,) = load_catalogue(HERE / name).values()
    assert isinstance(tool, RetoolCodeInterpreterTool)
    assert tool.spec == SPEC
