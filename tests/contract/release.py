"""Record the contract as released, under the version in proto/pyproject.toml.

`./pants run tests/contract/release.py`, from the root of the repository, as part of a release
(CONTRIBUTING.md). It refuses when the contract breaks any release, and then writes nothing.
Recording the same version again is allowed while that version is not published: what was added
since goes in.
"""

import sys
import tomllib
from pathlib import Path

from contract.descriptors import current_set, released_sets
from contract.wire_diff import breakages

PYPROJECT = Path("proto/pyproject.toml")
DIRECTORY = Path("tests/contract/released")


def main() -> None:
    """Writes the descriptor set of today's contract, or exits with what it breaks."""
    if not PYPROJECT.is_file():
        raise SystemExit(f"{PYPROJECT} not found: run this from the root of the repository")
    version = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["version"]
    current = current_set()
    broken = [
        f"  {release}: {breakage}"
        for release, released in released_sets().items()
        for breakage in breakages(released, current)
    ]
    if broken:
        raise SystemExit("\n".join(["The contract breaks what was released:", *broken]))
    target = DIRECTORY / f"{version}.binpb"
    DIRECTORY.mkdir(exist_ok=True)
    target.write_bytes(current.SerializeToString(deterministic=True))
    print(f"{target}: {len(current.file)} files", file=sys.stderr)


if __name__ == "__main__":
    main()
