"""The Python of docs/train_an_existing_agent.md runs as it stands."""

import re
from pathlib import Path

_PAGE = Path(__file__).parents[5] / "docs" / "train_an_existing_agent.md"


def test_the_python_of_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, object] = {"__name__": "proxy_page"}
    for block in blocks:
        exec(compile(block, str(_PAGE), "exec"), namespace)
    assert namespace["forgetful"]
