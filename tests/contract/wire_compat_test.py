"""Today's contract keeps every promise of the releases before it."""

from pathlib import Path

import pytest

from contract.descriptors import CONTRACT_FILES, current_set, released_sets
from contract.wire_diff import breakages

RELEASES = released_sets()


def test_there_is_a_release_to_compare_with() -> None:
    assert RELEASES


@pytest.mark.parametrize("version", RELEASES)
def test_nothing_released_is_broken(version: str) -> None:
    broken = breakages(RELEASES[version], current_set())
    assert not broken, "\n".join(["", *map(str, broken)])


def test_every_proto_file_is_compared() -> None:
    root = Path("proto")
    on_disk = {p.relative_to(root).as_posix() for p in root.rglob("*.proto")}
    assert {file.name for file in CONTRACT_FILES} == on_disk
