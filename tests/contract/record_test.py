import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

from contract import record
from contract.descriptors import current_set

Commit = Callable[[str, bytes | None], None]


@pytest.fixture
def commit(tmp_path: Path) -> Commit:
    """Commits one file's new content, or its deletion, to a new repository in `tmp_path`."""

    def git(*args: str) -> None:
        identity = ("-c", "user.name=test", "-c", "user.email=test@treadle.invalid")
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True)

    def commit_file(name: str, content: bytes | None) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        git("add", "--all", ".")
        git("commit", "--quiet", "--message", name)

    git("init", "--quiet")
    return commit_file


def contract_with(name: str, kind: FieldDescriptorProto.Type.ValueType) -> FileDescriptorSet:
    """Returns today's contract with one more field in its first message."""
    files = current_set()
    file = next(f for f in files.file if f.package.startswith("treadle."))
    file.message_type[0].field.add(
        name=name, json_name=name, number=900, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL
    )
    return files


def test_a_recorded_field_cannot_be_rewritten_by_recording_it_again(
    commit: Commit, tmp_path: Path
) -> None:
    recorded = contract_with("rank", FieldDescriptorProto.TYPE_INT64)
    rewritten = contract_with("rank", FieldDescriptorProto.TYPE_STRING)
    commit(record.RECORD, current_set().SerializeToString())
    assert not record.broken_promises(rewritten, record.recorded_sets(tmp_path))
    commit(record.RECORD, recorded.SerializeToString())
    # The record can be written over or deleted, and history has it still.
    commit(record.RECORD, rewritten.SerializeToString())
    commit(record.RECORD, None)
    commit(record.RECORD, rewritten.SerializeToString())
    history = record.recorded_sets(tmp_path)
    assert len(history) == 4
    assert not record.broken_promises(recorded, dict(list(history.items())[2:]))
    (line,) = record.broken_promises(rewritten, history)
    assert "rank: FIELD_TYPE_CHANGED: 'TYPE_INT64' became 'TYPE_STRING' (recorded in " in line


def test_a_changed_file_of_a_release_is_found(commit: Commit, tmp_path: Path) -> None:
    wheel, sums = (f"tests/contract/released/0.1.0/{name}" for name in ("a.whl", "SHA256SUMS"))
    commit(wheel, b"as it was built")
    commit(sums, b"sum")
    assert record.changed_releases(tmp_path) == []
    commit(wheel, b"built again")
    commit(wheel, None)
    commit(wheel, b"as it was built")
    assert [line.split()[1] for line in record.changed_releases(tmp_path)] == [wheel, wheel]


def test_a_breakage_of_many_releases_is_reported_once() -> None:
    before = contract_with("rank", FieldDescriptorProto.TYPE_INT64)
    (line,) = record.broken_promises(current_set(), {"0.1.0": before, "0.2.0": before})
    assert line.endswith("(0.1.0)")
