import hashlib
import subprocess
from pathlib import Path

import pytest

from contract import release


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one package, ready to be released as 0.2.0."""
    folder = tmp_path / "proto"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nversion = "0.2.0"\ndependencies = ["grpcio>=1.76"]\n'
    )
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0 (2026-11-23)\n")
    identity = ("-c", "user.name=test", "-c", "user.email=test@treadle.invalid")
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "release"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_tree_that_agrees_with_itself_can_be_released(root: Path) -> None:
    assert release.why_not(root, "0.2.0") == []


def test_all_that_is_in_the_way_is_reported_at_once(root: Path) -> None:
    (root / "tests/contract/released/0.2.0").mkdir(parents=True)
    (root / "proto/CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    (root / "proto/pyproject.toml").write_text(
        '[project]\nversion = "0.2.0.dev0"\n[project.optional-dependencies]\n'
        'more = ["treadle-tracing~=0.1.0"]\n'
    )
    assert release.why_not(root, "0.2.0") == [
        "0.2.0 is released already: a release is never written again",
        "2 files are not as committed, proto/CHANGELOG.md first",
        "proto has version 0.2.0.dev0 in its pyproject.toml",
        "proto requires treadle-tracing~=0.1.0, not ~=0.2.0",
        "proto's CHANGELOG.md has no section '## 0.2.0 (YYYY-MM-DD)'",
    ]


def test_the_kept_folder_sums_up_all_that_was_built(tmp_path: Path) -> None:
    built, target = tmp_path / "dist", tmp_path / "released/0.2.0"
    built.mkdir()
    for name in ("treadle_proto-0.2.0-py3-none-any.whl", "treadle_trainer-0.2.0-py3-none-any.whl"):
        (built / name).write_bytes(name.encode())
    release.keep(built, target, "abc123")
    assert sorted(path.name for path in target.iterdir()) == [
        "SHA256SUMS",
        "contract.binpb",
        "treadle_proto-0.2.0-py3-none-any.whl",
    ]
    first, *lines = (target / "SHA256SUMS").read_text().splitlines()
    assert first == "# built from commit abc123"
    trainer = hashlib.sha256(b"treadle_trainer-0.2.0-py3-none-any.whl").hexdigest()
    assert lines[-1] == f"{trainer}  treadle_trainer-0.2.0-py3-none-any.whl"
    assert len(lines) == 3
