"""The documentation site builds strictly, needs no other host, and links as GitHub does."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MKDOCS = (ROOT / "mkdocs.yml").read_text()
pytest.importorskip("mkdocs", reason="the resolve `site` has it")
SMALL = """\
site_name: Small
repo_url: https://host.example/me/it
docs_dir: docs
site_dir: out
nav: [index.md, sub/README.md, tools/README.md]
hooks: [{hooks}]
theme: {{name: mkdocs}}
plugins: []
validation:
  nav: {{omitted_files: warn}}
  links: {{anchors: warn, unrecognized_links: warn}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this repository, built strictly."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "build-support/build_site.py", "--out", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


def links(page: Path) -> set[str]:
    return set(re.findall(r'(?:href|src)="([^"]*)"', page.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("index.html", "write_a_tool.html"),
        ("index.html", "architecture.svg"),
        ("index.html", "examples/retool/index.html"),
        ("index.html", "https://treadle.example/blob/main/LICENSE"),
        ("architecture.html", "adr/index.html"),
        ("conformance.html", "packages/rollout_server/index.html#write-an-engine"),
        ("protocol.html", "https://treadle.example/tree/main/proto/treadle/rollout/v1"),
        ("adr/0015-rooms.html", "../vocabulary.html"),
    ],
)
def test_a_link_leads_to_the_page_or_else_to_the_source(site: Path, page: str, link: str) -> None:
    assert link in links(site / page)


def test_a_bar_in_the_code_of_a_table_is_a_bar(site: Path) -> None:
    assert "<code>|handler</code>" in (site / "sandbox.html").read_text(encoding="utf-8")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|iframe)[^>]* src="https?:'
        r'|<link[^>]* rel="(?:stylesheet|preconnect)"[^>]* href="https?:'
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    assert [page for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []


def test_the_reference_has_what_the_packages_export(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    documented = set(re.findall(r' id="(treadle\.[\w.]+)"', pages))
    modules = re.findall(r"reference/(treadle\S+)\.md", MKDOCS)
    exported = {f"{module}.{name}" for module in modules for name in exports(module)}
    assert len(exported) > 150
    assert exported - documented == set()


def exports(module: str) -> list[str]:
    """The names in the `__all__` of a module's source."""
    path = module.replace(".", "/")
    places = (f"packages/*/{path}.py", f"packages/*/{path}/__init__.py")
    (source,) = [found for place in places for found in ROOT.glob(place)]
    return re.findall(r'"(\w+)"', source.read_text().partition("\n__all__ = ")[2])


def test_the_search_finds_guides_and_names_of_the_reference(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"] for entry in index["docs"]}
    assert "write_a_tool.html" in found
    assert "reference/treadle.agent_loop.html#treadle.agent_loop.Conversation" in found


def build_small(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Builds a site of three pages, the first with this text."""
    pages = {
        "docs/index.md": f"# Home\n\n{text}\n",
        "docs/sub/README.md": "# Sub\n\n[up](../../tools#use) `[no](link.md)`\n",
        "tools/README.md": "# Tools\n\n## Use\n\n[code](src/) [home](../docs/index.md)\n",
    }
    for name in ("docs/sub", "tools/src"):
        (folder / name).mkdir(parents=True)
    for name, content in pages.items():
        (folder / name).write_text(content)
    (folder / "mkdocs.yml").write_text(SMALL.format(hooks=ROOT / "build-support/site_hooks.py"))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_pages_from_outside_docs_are_linked_both_ways(tmp_path: Path) -> None:
    built = build_small(
        tmp_path, "[sub](sub) [tools](../tools/README.md#use) [web](https://a.example)"
    )
    assert built.returncode == 0, built.stderr
    assert links(tmp_path / "out/index.html") >= {"sub/", "tools/#use", "https://a.example"}
    assert "../tools/#use" in links(tmp_path / "out/sub/index.html")
    tools = links(tmp_path / "out/tools/index.html")
    assert tools >= {"https://host.example/me/it/tree/main/tools/src", ".."}


def test_what_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    text = "[a](gone.md) [b](../tools/gone.py) [c](../tools/README.md#gone) [d](../../outside)"
    built = build_small(tmp_path, text)
    assert built.returncode != 0
    for named in ("gone.md", "../tools/gone.py", "#gone", "../../outside"):
        assert f"'{named}'" in built.stderr
