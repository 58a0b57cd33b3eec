"""The Python of the guides in docs/ runs as it stands, a page at a time."""

import re
from pathlib import Path

import pytest

GUIDES = ("write_a_tool.md", "write_your_own_loop.md")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", GUIDES)
def test_the_python_of_a_guide_runs(name: str) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) > 2
    namespace: dict[str, object] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)


def test_every_link_of_the_docs_leads_somewhere() -> None:
    root = DOCS.parent
    pages = [root / "README.md", *DOCS.glob("**/*.md")]
    broken = [
        f"{page.relative_to(root)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
