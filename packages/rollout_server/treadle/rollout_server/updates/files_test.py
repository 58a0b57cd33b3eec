import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.errors import (
    FileCorrupt,
    FileMissing,
    FileOutsideRoot,
    RolloutServerError,
    TensorMismatch,
)
from treadle.rollout_server.updates.delta import DeltaEncoding
from treadle.rollout_server.updates.files import WeightFiles, stage_files
from treadle.rollout_server.updates.staging import Assembler

SPECS = (
    TensorSpec(name="a", element_type=ElementType.BFLOAT16, shape=(2, 3)),
    TensorSpec(name="b", element_type=ElementType.FLOAT32, shape=()),
)
DATA = {"a": bytes(range(12)), "b": b"wxyz"}
CRC32 = [zlib.crc32(DATA[spec.name]) for spec in SPECS]
ENTRIES = {"a": ("BF16", [2, 3]), "b": ("F32", [])}


def write(path: Path, tensors: Mapping[str, bytes]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, data in tensors.items():
        dtype, shape = ENTRIES.get(name, ("F32", [1]))
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def stage(root: Path | None, directory: str = "1", crc32: list[int] | None = None) -> list[bytes]:
    assembler = Assembler(SPECS, max_chunk_bytes=64)
    files = WeightFiles(directory=directory, crc32=tuple(CRC32 if crc32 is None else crc32))
    stage_files(files, assembler, root=root, filled=assembler.filled)
    return [bytes(tensor.data) for tensor in assembler.named_tensors()]


def test_a_link_that_may_not_be_read_leads_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def readlink(path: object, **_: object) -> str:
        raise PermissionError(13, "Permission denied", path)

    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(os, "readlink", readlink)  # As the kernel does for /proc/1/root.
    with pytest.raises(FileOutsideRoot, match="link"):
        stage(tmp_path, "link")


def test_the_files_of_a_directory_together_hold_the_tensors(tmp_path: Path) -> None:
    write(tmp_path / "1" / "x.safetensors", {"b": DATA["b"]})
    write(tmp_path / "1" / "y.safetensors", {"a": DATA["a"]})
    (tmp_path / "1" / "notes.txt").write_text("not a weight file")
    assert stage(tmp_path) == [DATA["a"], DATA["b"]]
    assert stage(tmp_path, str(tmp_path / "1")) == [DATA["a"], DATA["b"]]


@pytest.mark.parametrize("directory", ["..", "../other", "/etc", "1/../../other", "link", "\0"])
def test_nothing_outside_the_root_is_read(tmp_path: Path, directory: str) -> None:
    root = tmp_path / "root"
    write(tmp_path / "other" / "x.safetensors", DATA)
    (root / "1").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "other")
    with pytest.raises(FileOutsideRoot):
        stage(root, directory)


def test_a_file_that_is_a_link_out_of_the_root_is_not_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(tmp_path / "secret.safetensors", DATA)
    (root / "1").mkdir(parents=True)
    (root / "1" / "x.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(FileOutsideRoot):
        stage(root)


def test_without_a_root_there_is_no_file_transport() -> None:
    with pytest.raises(FileOutsideRoot, match=r"--weights\.directory"):
        stage(None)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"a": DATA["a"]}, TensorMismatch, "'b' is absent from the files, expected float32"),
        (DATA | {"c": b"1234"}, TensorMismatch, "'c' is float32"),
        (DATA | {"b": b"WXYZ"}, FileCorrupt, "tensor 'b' has CRC-32"),
        (DATA | {"b": b"12345678"}, FileCorrupt, "in 8 bytes"),
    ],
)
def test_a_difference_from_the_announcement_is_named(
    tmp_path: Path, tensors: dict[str, bytes], error: type[RolloutServerError], message: str
) -> None:
    write(tmp_path / "1" / "x.safetensors", tensors)
    with pytest.raises(error, match=message):
        stage(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "1" / "x.safetensors", DATA)
    write(tmp_path / "1" / "y.safetensors", {"b": DATA["b"]})
    with pytest.raises(TensorMismatch, match="'b' is in two files"):
        stage(tmp_path)


def test_what_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="no such directory"):
        stage(tmp_path)
    (tmp_path / "1").mkdir()
    with pytest.raises(FileMissing, match=r"holds no \*\.safetensors file"):
        stage(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    os.mkfifo(tmp_path / "1" / "x.safetensors")
    with pytest.raises(FileMissing, match="not a regular file"):
        stage(tmp_path)


def test_a_name_that_no_file_can_have_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="name too long"):
        stage(tmp_path, "x" * 5000)


def test_a_header_nested_too_deep_is_corrupt(tmp_path: Path) -> None:
    text = b"[" * 100_000
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(FileCorrupt, match="not JSON"):
        stage(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"nope",
    ],
)
def test_a_file_of_another_format_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "x.safetensors").write_bytes(content)
    with pytest.raises(FileCorrupt, match="not a safetensors file"):
        stage(tmp_path)


def test_a_file_that_was_cut_short_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "1" / "x.safetensors"
    write(path, DATA)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileCorrupt, match="cut short"):
        stage(tmp_path)


CHANGES = {"a": (1).to_bytes(8, "little") + (2).to_bytes(4, "little") + b"xy", "b": b""}
DELTA = DeltaEncoding(base_version=4, encoded_bytes=(14, 0), crc32=(0, 0))


def write_changes(path: Path, changes: Mapping[str, bytes], base: str = "4") -> None:
    header: dict[str, object] = {"__metadata__": {"base_weight_version": base}}
    offset = 0
    for name, data in changes.items():
        end = offset + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(changes.values()))


def stage_changes(root: Path) -> list[bytes]:
    assembler = Assembler(SPECS, max_chunk_bytes=64, sizes=DELTA.encoded_bytes)
    crc32 = tuple(zlib.crc32(CHANGES[spec.name]) for spec in SPECS)
    files = WeightFiles(directory="1", crc32=crc32)
    stage_files(files, assembler, root=root, filled=assembler.filled, delta=DELTA)
    assert assembler.complete
    return [bytes(assembler.view(index)) for index in range(len(SPECS))]


def test_the_files_of_a_delta_hold_what_it_is_encoded_as(tmp_path: Path) -> None:
    write_changes(tmp_path / "1" / "x.safetensors", {"b": b""})
    write_changes(tmp_path / "1" / "y.safetensors", {"a": CHANGES["a"]})
    assert stage_changes(tmp_path) == list(CHANGES.values())


@pytest.mark.parametrize(
    ("changes", "base", "message"),
    [
        (CHANGES, "3", "changes of version 3, announced: 4: write it again"),
        (CHANGES | {"a": CHANGES["a"][:-1] + b"!"}, "4", "tensor 'a' has CRC-32"),
        (CHANGES | {"a": b""}, "4", "0 bytes of changes of 'a', announced: 14"),
        (CHANGES | {"c": b"new"}, "4", "3 bytes of changes of 'c', announced: no more"),
        ({"b": b""}, "4", "no file has the changes of 1 tensors, 'a' for one"),
    ],
)
def test_other_changes_than_announced_are_damage_and_named(
    tmp_path: Path, changes: dict[str, bytes], base: str, message: str
) -> None:
    write_changes(tmp_path / "1" / "x.safetensors", changes, base)
    with pytest.raises((FileCorrupt, FileMissing), match=message):
        stage_changes(tmp_path)


def test_a_delta_is_not_taken_for_weights_nor_weights_for_a_delta(tmp_path: Path) -> None:
    write_changes(tmp_path / "1" / "x.safetensors", CHANGES)
    with pytest.raises(FileCorrupt, match="'a' is U8, expected one of F32"):
        stage(tmp_path)
    write(tmp_path / "1" / "x.safetensors", DATA)
    with pytest.raises(
        FileCorrupt, match=r"'a' is BF16\[2, 3\] in 12 bytes, expected encoded bytes"
    ):
        stage_changes(tmp_path)


def test_changes_are_in_one_file_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "1" / "x.safetensors"
    write_changes(path, CHANGES)
    write_changes(tmp_path / "1" / "y.safetensors", {"b": b""})
    with pytest.raises(FileCorrupt, match="changes of 'b', announced: no more"):
        stage_changes(tmp_path)
    (tmp_path / "1" / "y.safetensors").unlink()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileCorrupt, match="cut short"):
        stage_changes(tmp_path)
