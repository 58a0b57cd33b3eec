"""The README's Python runs as it stands."""

import re
from pathlib import Path

from treadle.agent_loop.parsers import PARSER_NAMES, parser_named

README = Path(__file__).parents[2] / "README.md"


def test_the_python_of_the_readme_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["divide"]


def test_the_readme_lists_every_parser() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", README.read_text(), re.MULTILINE)
    listed = {name: cells.split(" | ") for name, cells in rows if name in PARSER_NAMES}
    assert list(listed) == list(PARSER_NAMES)
    for name, (_, _, reasoning, ends) in listed.items():
        parser = parser_named(name)
        assert (reasoning == "in the content") == (parser.parse("").reasoning is None)
        stops = re.findall("`([^`]+)`", ends.replace("\\|", "|"))
        assert stops == list(parser.stop_tokens)
