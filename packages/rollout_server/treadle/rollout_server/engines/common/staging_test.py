from contextlib import closing
from pathlib import Path

import pytest
import torch

from treadle.rollout_server.engine import ElementType, FilePlace, NamedTensor, TensorSpec
from treadle.rollout_server.engines.common.staging import MappedFiles, staging


def tensor(name: str, content: bytes, place: FilePlace | None = None) -> NamedTensor:
    spec = TensorSpec(name=name, element_type=ElementType.FLOAT16, shape=(len(content) // 2,))
    return NamedTensor(spec=spec, data=memoryview(bytearray(content)), place=place)


def read(path: str, offset: int, num_bytes: int) -> bytes:
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def test_a_tensor_that_is_in_a_file_is_left_there() -> None:
    place = FilePlace(path="/somewhere", offset=7)
    with staging() as staged:
        entry = staged.entry(tensor("a", b"1234", place))
    assert entry == ("a", "float16", [2], "/somewhere", 7)


def test_others_are_copied_side_by_side() -> None:
    with staging() as staged:
        entries = [staged.entry(tensor(name, name.encode() * 10)) for name in ("ab", "cd")]
        found = [read(path, offset, 20) for *_, path, offset in entries]
    assert found == [b"ab" * 10, b"cd" * 10]


def test_a_place_is_reused_when_its_tensor_was_taken() -> None:
    with staging() as staged:
        entries = [staged.entry(tensor(name, b"12" * 4), reuse=True) for name in ("a", "b")]
    assert {entry[4] for entry in entries} == {0}


def test_the_memory_is_gone_afterwards() -> None:
    with staging() as staged:
        path = staged.entry(tensor("a", b"1234"))[3]
    with pytest.raises(OSError, match="No such file"):
        read(path, 0, 4)


def test_tensors_are_read_where_they_lie(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    values = torch.arange(6, dtype=torch.float32)
    path.write_bytes(b"abc" + bytes(1) + values.numpy().tobytes())
    with closing(MappedFiles()) as files:
        found = files.tensor(("a", "float32", [2, 3], str(path), 4))
        assert found.tolist() == values.reshape(2, 3).tolist()


def test_a_place_that_is_not_aligned_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    values = torch.arange(4, dtype=torch.float32)
    path.write_bytes(b"abc" + values.numpy().tobytes())
    with closing(MappedFiles()) as files:
        assert files.tensor(("a", "float32", [4], str(path), 3)).tolist() == values.tolist()


def test_a_file_shows_what_is_written_to_it_and_may_grow(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4))
    with closing(MappedFiles()) as files:
        assert files.tensor(("a", "float16", [2], str(path), 0)).tolist() == [0, 0]
        with path.open("r+b") as file:
            file.write(torch.ones(8, dtype=torch.float16).numpy().tobytes())
        assert files.tensor(("a", "float16", [2], str(path), 0)).tolist() == [1, 1]
        assert files.tensor(("b", "float16", [8], str(path), 0)).tolist() == [1] * 8


def test_a_tensor_without_elements_needs_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    with closing(MappedFiles()) as files:
        assert files.tensor(("a", "float32", [0, 2], str(path), 0)).shape == (0, 2)
