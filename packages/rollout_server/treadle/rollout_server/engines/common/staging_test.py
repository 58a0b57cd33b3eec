from pathlib import Path

import pytest

from treadle.rollout_server.engine import ElementType, FilePlace, NamedTensor, TensorSpec
from treadle.rollout_server.engines.common.staging import staging


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
