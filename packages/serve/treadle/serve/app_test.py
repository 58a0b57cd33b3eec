"""The page shows every path of the API: what is answered, and what is refused."""

from pathlib import Path

from treadle.serve.app import PATHS
from treadle.tinker import sdk


def table() -> str:
    """Returns the table of the page."""
    lines = ["| path below `/api/v1` | |", "|---|---|"]
    for (method, path), answer in PATHS.items():
        told = f"no {answer[0]}: {answer[1]}" if isinstance(answer, tuple) else "answered"
        lines.append(f"| `{method} {path}` | {told} |")
    return "\n".join(lines)


def test_the_page_has_the_table_of_all_paths() -> None:
    page = Path("docs/serve.md").read_text(encoding="utf-8")
    assert table() in page, f"replace the table of docs/serve.md by\n{table()}"


def test_every_path_of_the_sdk_is_answered_or_refused() -> None:
    assert set(sdk.PATHS) == PATHS.keys()
