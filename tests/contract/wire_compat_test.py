"""Today's contract keeps every promise of the releases before it, and what was recorded since."""

import ast
import hashlib
import zipfile
from pathlib import Path

import pytest

from contract.descriptors import (
    CONTRACT_FILES,
    current_set,
    recorded_set,
    release_folders,
    released_sets,
)
from contract.release import KEPT
from contract.wire_diff import PACKAGE_PREFIX, breakages

RELEASES = released_sets()


def test_there_is_a_release_to_compare_with() -> None:
    assert RELEASES


@pytest.mark.parametrize("version", RELEASES)
def test_nothing_released_is_broken(version: str) -> None:
    broken = breakages(RELEASES[version], current_set())
    assert not broken, "\n".join(["", *map(str, broken)])


def test_nothing_recorded_is_broken() -> None:
    broken = breakages(recorded_set(), current_set())
    assert not broken, "\n".join(["", *map(str, broken)])


def test_all_of_the_contract_is_recorded() -> None:
    # What the record would break is what it lacks.
    unrecorded = {breakage.symbol for breakage in breakages(current_set(), recorded_set())}
    assert not unrecorded, "record it: ./pants run tests/contract/record.py"


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_holds_what_was_built(version: str) -> None:
    folder = release_folders()[version]
    sums = (folder / "SHA256SUMS").read_text()
    digests: dict[str, str] = {}
    for line in sums.splitlines()[1:]:  # the first names the commit
        digest, name = line.split("  ")
        digests[name] = digest
    kept = {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    assert kept == {"contract.binpb"} | {f"treadle_{p}-{version}-py3-none-any.whl" for p in KEPT}
    for name in kept:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digests[name], name


@pytest.mark.parametrize("version", RELEASES)
def test_the_contract_of_a_release_is_the_one_in_its_wheel(version: str) -> None:
    wheel = release_folders()[version] / f"treadle_proto-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        stubs = [archive.read(name) for name in archive.namelist() if name.endswith("_pb2.py")]
    in_wheel = {
        node.args[0].value
        for stub in stubs
        for node in ast.walk(ast.parse(stub))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "AddSerializedFile"
        and isinstance(node.args[0], ast.Constant)
    }
    kept = [f for f in RELEASES[version].file if f.package.startswith(PACKAGE_PREFIX)]
    assert in_wheel == {file.SerializeToString() for file in kept}


def test_every_proto_file_is_compared() -> None:
    root = Path("proto")
    on_disk = {p.relative_to(root).as_posix() for p in root.rglob("*.proto")}
    assert {file.name for file in CONTRACT_FILES} == on_disk
