"""Encoding, against an encoding made element by element."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from treadle.trainer.policy.commands import Compare, WriteFiles
from treadle.trainer.policy.types import ElementType
from treadle.trainer.weight_sync.conftest import Taker, Weights
from treadle.trainer.weight_sync.delta import DeltaSender, encode
from treadle.trainer.weight_sync.payload import tensor_bytes


@given(st.data(), st.integers(0, 40))
def test_the_changes_lead_from_the_old_to_the_new(data: st.DataObject, count: int) -> None:
    parts = st.binary(min_size=4 * count, max_size=4 * count)
    old, new = data.draw(parts), data.draw(parts)
    encoded = encode(memoryview(old), memoryview(new), "float32")
    assert encoded is not None
    assert Taker._changed(old, encoded) == new


def test_bits_are_compared_and_not_numbers() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0])
    new = torch.tensor([-0.0, float("nan"), 1.0, 3.0])
    encoded = encode(tensor_bytes(old, "float32"), tensor_bytes(new, "float32"), "float32")
    assert encoded is not None
    assert int.from_bytes(encoded[:8], "little") == 2
    assert np.frombuffer(encoded[8:16], "<u4").tolist() == [0, 3]


@pytest.mark.parametrize(("element_type", "share"), [("float32", 0.05), ("bfloat16", 0.1)])
def test_two_changes_of_a_hundred_take_less_than_a_tenth(
    element_type: ElementType, share: float
) -> None:
    old = torch.randn(100_000)
    new = old.clone()
    new[::50] += 1
    whole = tensor_bytes(new, element_type)
    encoded = encode(tensor_bytes(old, element_type), whole, element_type)
    assert encoded is not None and len(encoded) < share * len(whole)


def test_changes_are_against_the_version_that_is_kept_and_no_other() -> None:
    weights, sender = Weights(), DeltaSender()

    def compare(version: int, base: int | None) -> bool:
        command = Compare(version=version, base_version=base, element_type="float32")
        return sender.compare(weights, command, rank=0).fits

    assert not compare(1, 0)
    assert compare(2, 1)
    assert not compare(3, 1)
    weights.tensors["a"][0, 0] += 1
    command = Compare(version=4, base_version=3, element_type="float32")
    report = sender.compare(weights, command, rank=0)
    assert report.encoded_bytes == {"a": 16, "b": 0, "empty": 0, "scalar": 0}


def test_a_file_of_changes_says_what_it_is(tmp_path: Path) -> None:
    weights, sender = Weights(), DeltaSender()
    for version, base in ((1, None), (2, 1)):
        weights.tensors["a"][1, 2] += 1
        command = Compare(version=version, base_version=base, element_type="float32")
        sender.compare(weights, command, rank=0)
    write = WriteFiles(directory=tmp_path, element_type="float32", version=2, base_version=1)
    report = sender.write(weights, write, rank=0)
    value = tensor_bytes(weights.tensors["a"][1, 2], "float32")
    encoded = (1).to_bytes(8, "little") + (7).to_bytes(4, "little") + bytes(value)
    (file,) = tmp_path.iterdir()
    with safe_open(file, "np") as opened:
        read = {name: opened.get_tensor(name).tobytes() for name in opened.keys()}  # noqa: SIM118
        assert opened.metadata() == {
            "weight_version": "2",
            "base_weight_version": "1",
            "element_type": "float32",
        }
    assert read == {"a": encoded, "b": b"", "empty": b"", "scalar": b""}
    assert report.crc32 == {name: zlib.crc32(data) for name, data in read.items()}
    assert report.num_bytes == len(encoded)
    assert sender.write(weights, write, rank=1).num_bytes == 0
