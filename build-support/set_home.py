"""Writes the project's public home into every file that names it, or checks that it has one.

    python3 build-support/set_home.py https://HOST/OWNER/REPOSITORY
    python3 build-support/set_home.py --check

The home is the web address of the repository: what is below `/blob/main/` there is a file of it.
The project has none yet; until then its name is a reserved one (RFC 2606), and `--check`, a step of
every release, fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tomllib
from pathlib import Path
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parent.parent
RESERVED = (".example", ".invalid", ".test")


def current_home(root: Path) -> str:
    """Returns the home that the packages' metadata names."""
    with open(root / "proto" / "pyproject.toml", "rb") as file:
        home: str = tomllib.load(file)["project"]["urls"]["Homepage"]
    return home


def why_not(home: str) -> str | None:
    """Returns what is wrong with an address as the home, or None."""
    parsed = urlparse(home)
    if parsed.scheme != "https" or not parsed.hostname or home.endswith("/"):
        return f"{home!r} is not an https address without a slash at its end"
    if parsed.hostname.endswith(RESERVED):
        return (
            f"the home is {home}, a name that is reserved for examples: "
            "write the real one with build-support/set_home.py https://HOST/OWNER/REPOSITORY"
        )
    return None


def set_home(root: Path, files: list[str], new: str) -> list[str]:
    """Replaces the home in the text files among `files`; returns those that changed."""
    old = re.compile(re.escape(current_home(root)) + r"(?![\w-]|\.\w)")
    changed = []
    for name in files:
        path = root / name
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        replaced = old.sub(lambda _: new, text)
        if replaced != text:
            path.write_text(replaced, encoding="utf-8")
            changed.append(name)
    return changed


def main() -> None:
    """Rewrites, or only checks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("home", nargs="?", help="the new home")
    what.add_argument("--check", action="store_true", help="fail unless the home is a real one")
    args = parser.parse_args()
    if problem := why_not(current_home(ROOT) if args.check else args.home):
        raise SystemExit(f"set_home.py: {problem}")
    if not args.check:
        tracked = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        files = [name for name in tracked.stdout.split("\0") if (ROOT / name).is_file()]
        print("\n".join(set_home(ROOT, files, args.home)))


if __name__ == "__main__":
    main()
