"""Writes the version of a release, or of the work after it, into every package.

    python3 build-support/set_version.py 0.2.0         # about to release
    python3 build-support/set_version.py 0.3.0.dev0    # after the release

All packages have the same version. Each requires its siblings with `~=VERSION`: in one environment
they are of one minor version (docs/versions.md). A release gives the changelogs' "Unreleased" its
version and date; the development version after it opens a new one.
"""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+(\.dev\d+)?")
UNRELEASED = "## Unreleased"


def projects(root: Path) -> list[Path]:
    """Returns the folders of the packages, the contract first."""
    return [root / "proto", *sorted(p.parent for p in root.glob("packages/*/pyproject.toml"))]


def with_version(pyproject: str, version: str) -> str:
    """Returns the text of a pyproject.toml with another version of the package and its siblings."""
    text = re.sub(r'^version = "[^"]*"', f'version = "{version}"', pyproject, flags=re.MULTILINE)
    return re.sub(r'("treadle-[a-z-]+(?:\[[a-z,]+\])?)~=[^"]*"', rf'\g<1>~={version}"', text)


def with_heading(changelog: str, version: str, today: datetime.date) -> str:
    """Returns the text of a changelog whose newest heading fits the version.

    Raises:
        ValueError: A release without a section "Unreleased".
    """
    lines = changelog.splitlines()
    if ".dev" not in version:
        if UNRELEASED not in lines:
            raise ValueError(f"there is no section '{UNRELEASED}' to release as {version}")
        lines[lines.index(UNRELEASED)] = f"## {version} ({today})"
    elif UNRELEASED not in lines:
        first = next(i for i, line in enumerate(lines) if line.startswith("## "))
        lines[first:first] = [UNRELEASED, ""]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrites the metadata and the changelogs of all packages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="MAJOR.MINOR.PATCH, or that with .devN")
    version = parser.parse_args().version
    if not VERSION.fullmatch(version):
        raise SystemExit(f"set_version.py: {version!r} is not MAJOR.MINOR.PATCH or that with .devN")
    today = datetime.datetime.now(datetime.UTC).date()
    texts: dict[Path, str] = {}
    for project in projects(ROOT):
        metadata, changelog = project / "pyproject.toml", project / "CHANGELOG.md"
        texts[metadata] = with_version(metadata.read_text(encoding="utf-8"), version)
        try:
            texts[changelog] = with_heading(changelog.read_text(encoding="utf-8"), version, today)
        except ValueError as error:
            raise SystemExit(f"set_version.py: {changelog.relative_to(ROOT)}: {error}") from None
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(texts) // 2} packages are {version}")


if __name__ == "__main__":
    main()
