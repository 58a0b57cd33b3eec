"""The Python of docs/langgraph.md runs as it stands."""

import re
from pathlib import Path

_PAGE = Path(__file__).parents[5] / "docs" / "langgraph.md"


def test_the_python_of_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    namespace: dict[str, object] = {"__name__": "langgraph_page"}
    for block in blocks:
        exec(compile(block, str(_PAGE), "exec"), namespace)
    assert namespace["hands_in"]
