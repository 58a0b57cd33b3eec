"""Record what was added to the contract; what is recorded can no longer be rewritten.

`./pants run tests/contract/record.py`, from the root of the repository, writes today's contract to
tests/contract/recorded.binpb. A change of the contract is committed together with its record: the
tests fail where the contract holds anything that is not recorded, or lacks anything that is. A
field is thereby bound from the commit that adds it, not only from the next release on.

Writing the record anew does not loosen it. The contract is compared with every release and with
every version of the record in the git history, and nothing is written if it breaks one. `--check`
compares only (`.ci/run` does), and fails too where a commit changed or deleted a file of a release.
Until it is on the main branch, an addition is withdrawn by rewriting the commit that recorded it.
"""

import argparse
import subprocess
from collections.abc import Mapping
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from contract.descriptors import current_set, released_sets
from contract.wire_diff import breakages

RECORD = "tests/contract/recorded.binpb"
RELEASE_FILES = ":(glob)tests/contract/released/*/**"


def recorded_sets(root: Path) -> dict[str, FileDescriptorSet]:
    """Returns every version of the record by "recorded in COMMIT", newest first.

    Raises:
        subprocess.CalledProcessError: `root` is in no git repository.
    """
    # In a merge the record may have come from either side.
    commits = _git(
        root, "log", "--full-history", "-m", "--format=%h", "--diff-filter=AM", "--", RECORD
    )
    return {
        f"recorded in {commit}": FileDescriptorSet.FromString(
            _git(root, "show", f"{commit}:{RECORD}")
        )
        for commit in dict.fromkeys(commits.decode().split())
    }


def changed_releases(root: Path) -> list[str]:
    """Returns "COMMIT PATH" for each file of a release that a commit changed or deleted."""
    log = _git(
        root, "log", "--full-history", "-m", "--no-renames", "--format=%h", "--name-only",
        "--diff-filter=MD", "--", RELEASE_FILES,
    ).decode()  # fmt: skip
    found, commit = [], ""
    for line in filter(None, log.splitlines()):
        if "/" in line:
            found.append(f"{commit} {line}")
        else:
            commit = line
    return found


def broken_promises(
    current: FileDescriptorSet, promises: Mapping[str, FileDescriptorSet]
) -> list[str]:
    """Returns a line per breakage of an earlier version of the contract, each breakage once."""
    found: dict[str, str] = {}
    for name, earlier in promises.items():
        for breakage in breakages(earlier, current):
            found.setdefault(str(breakage), name)
    return [f"{breakage} ({name})" for breakage, name in found.items()]


def main() -> None:
    """Writes the record, or exits with what the contract breaks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    check: bool = parser.parse_args().check
    root = Path()
    if not (root / "proto/pyproject.toml").is_file():
        raise SystemExit("proto/pyproject.toml not found: run this from the root of the repository")
    try:
        history, rewritten = recorded_sets(root), changed_releases(root)
    except subprocess.CalledProcessError as error:
        reason = f"the git history cannot be read: {error.stderr.decode().strip()}"
        # Whoever got the sources without it changed nothing that is recorded there.
        print(reason)
        raise SystemExit(0 if check else 1) from None
    current = current_set()
    broken = broken_promises(current, released_sets() | history)
    if broken:
        raise SystemExit(
            "\n  ".join(["The contract breaks what was released or recorded:", *broken])
        )
    if rewritten:
        raise SystemExit("\n  ".join(["Files of a release were changed or deleted:", *rewritten]))
    if not check:
        (root / RECORD).write_bytes(current.SerializeToString(deterministic=True))
    print(f"{'compared with' if check else 'recorded; it keeps'} {len(history)} earlier records")


def _git(root: Path, *args: str) -> bytes:
    return subprocess.run(["git", *args], cwd=root, capture_output=True, check=True).stdout


if __name__ == "__main__":
    main()
