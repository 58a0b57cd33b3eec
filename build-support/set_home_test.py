from pathlib import Path

import pytest
import set_home


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proto").mkdir()
    (tmp_path / "proto" / "pyproject.toml").write_text(
        '[project.urls]\nHomepage = "https://a.example"\nIssues = "https://a.example/issues"\n'
    )
    return tmp_path


def test_every_file_that_names_the_home_is_rewritten(root: Path) -> None:
    (root / "page.md").write_text("See https://a.example. Not https://a.example.org.\n")
    (root / "image.png").write_bytes(b"\x89PNG https://a.example")
    (root / "other.md").write_text("nothing\n")
    files = ["image.png", "other.md", "page.md", "proto/pyproject.toml"]
    changed = set_home.set_home(root, files, "https://host.org/me/treadle")
    assert changed == ["page.md", "proto/pyproject.toml"]
    assert set_home.current_home(root) == "https://host.org/me/treadle"
    assert (root / "page.md").read_text() == (
        "See https://host.org/me/treadle. Not https://a.example.org.\n"
    )


@pytest.mark.parametrize(
    ("home", "problem"),
    [
        ("https://host.org/me/treadle", None),
        ("https://treadle.example", "reserved for examples"),
        ("http://host.org/me/treadle", "not an https address"),
        ("https://host.org/", "without a slash"),
    ],
)
def test_a_release_needs_a_real_home(home: str, problem: str | None) -> None:
    found = set_home.why_not(home)
    assert (found is None) if problem is None else (found is not None and problem in found)
