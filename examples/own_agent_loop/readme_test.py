"""The Python of the repository's README runs as it stands, and is the example beside this."""

import inspect
import re
from pathlib import Path

from own_agent_loop.ask_twice import AskTwice

README = Path(__file__).parents[2] / "README.md"


def test_the_python_of_the_readme_runs() -> None:
    loop, use = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, object] = {"__name__": "readme"}
    exec(compile(loop + use, str(README), "exec"), namespace)
    assert namespace["trajectory"]


def test_the_loop_of_the_readme_is_the_example() -> None:
    def code(source: str) -> list[str]:
        return [line for line in source.splitlines() if line.strip() and '"""' not in line]

    assert set(code(inspect.getsource(AskTwice))) <= set(code(README.read_text()))
