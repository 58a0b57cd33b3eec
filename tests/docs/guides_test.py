"""The Python of the guides in docs/ runs as it stands, and what the pages name exists."""

import functools
import inspect
import re
from pathlib import Path
from typing import cast

import pytest

from treadle.trainer import train

GUIDES = ("rewards.md", "tracing_spans.md", "write_a_tool.md", "write_your_own_loop.md")
DOCS = Path(__file__).parents[2] / "docs"
SOURCES = ("packages", "proto")
NAMES_PATHS = ("docs/architecture.md", "CONTRIBUTING.md", "AGENTS.md")
# Metrics, folders that a run or a command makes, and what Pants hides from its tests.
NO_PATHS = {
    ".ci/run",
    "rollout/kl",
    "rollout/logprob_diff_{mean,p99,max}",
    "rollout/stale_tokens",
    *("checkpoints/", "logs/", "runs/", "dist/", "dist/export", "dist/site", "eval/", "loggers/"),
    *("groups/", "profiles/", "servers/", "tls/", "traces/", "trajectories/"),
}


@pytest.mark.parametrize("name", GUIDES)
def test_the_python_of_a_guide_runs(name: str) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) > 2
    namespace: dict[str, object] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)


def test_the_script_of_the_python_api_calls_train_as_it_is() -> None:
    # The notebook of examples/ shows that it trains.
    (script,) = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "python_api.md").read_text(), re.MULTILINE | re.DOTALL
    )
    definitions, call, rest = script.partition("result = train(")
    arguments = rest.partition("\n")[0].removesuffix(")")
    namespace: dict[str, object] = {}
    exec(compile(definitions, "python_api.md", "exec"), namespace)
    exec(f"given = dict(config={arguments})", namespace)
    assert call
    inspect.signature(train).bind(**cast(dict[str, object], namespace["given"]))


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


@functools.cache
def paths_of_sources() -> frozenset[str]:
    """Returns the ends of all paths below `SOURCES`: `a/b/c`, `b/c` and `c`."""
    root = DOCS.parent
    parts = [path.parts for source in SOURCES for path in (root / source).rglob("*")]
    return frozenset("/".join(path[first:]) for path in parts for first in range(len(path)))


def missing(paths: set[str]) -> list[str]:
    """Returns the paths that do not exist; they may leave out folders: `trainer/plan.py`."""
    return [
        path
        for path in sorted(paths)
        if not (DOCS.parent / path).exists() and path.rstrip("/") not in paths_of_sources()
    ]


@pytest.mark.parametrize("page", NAMES_PATHS)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    text = (DOCS.parent / page).read_text()
    named = set(re.findall(r"`([\w.{},-]+/[\w./{},-]*)`", text)) - NO_PATHS
    assert named
    assert missing(named) == []


def test_every_module_that_the_docs_name_exists() -> None:
    text = "".join(page.read_text() for page in DOCS.glob("**/*.md"))
    assert missing(set(re.findall(r"`((?!dist/)\w+/[\w./-]*\.(?:py|json|txt|yaml))`", text))) == []


def test_every_test_that_the_docs_name_exists() -> None:
    named: set[tuple[str, str]] = set()
    for page in DOCS.glob("**/*.md"):
        file = ""
        for path, test in re.findall(r"`([\w./]*_test\.py)?(?:::(test_\w+))?`", page.read_text()):
            file = path or file  # `::test_x` continues the list of the file before it
            if test:
                named.add((file, test))
    tests = [p for folder in (*SOURCES, "tests") for p in (DOCS.parent / folder).rglob("*_test.py")]
    defined = [
        (p.relative_to(DOCS.parent).as_posix(), set(re.findall(r"def (test_\w+)", p.read_text())))
        for p in tests
    ]
    lacking = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if not any(f"/{path}".endswith(f"/{file}") and test in names for path, names in defined)
    ]
    assert len(named) > 40
    assert lacking == []
