from pathlib import Path

import pytest
import torch

from treadle.rollout_server.engine import (
    ElementType,
    FilePlace,
    NamedTensor,
    TensorSpec,
)
from treadle.rollout_server.engines.common.staging import staging
from treadle.rollout_server.engines.sglang.weights import (
    WorkerError,
    decode_errors,
    encode_batch,
    encode_errors,
    map_batch,
    split_batches,
)


def named(name: str, tensor: torch.Tensor, place: FilePlace | None = None) -> NamedTensor:
    element_type = ElementType(str(tensor.dtype).removeprefix("torch."))
    spec = TensorSpec(name=name, element_type=element_type, shape=tuple(tensor.shape))
    data = bytearray(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return NamedTensor(spec=spec, data=memoryview(data), place=place)


def told(batch: list[NamedTensor]) -> dict[str, torch.Tensor]:
    """What a worker reads of a batch."""
    with staging() as memory:
        message = encode_batch(memory.entry(tensor) for tensor in batch)
        return {name: tensor.clone() for name, tensor in map_batch(message)}


def test_tensors_in_no_file_arrive() -> None:
    first = torch.arange(7, dtype=torch.float32)
    second = torch.randn(3, 5).bfloat16()
    read = told([named("a", first), named("b", second)])
    assert torch.equal(read["a"], first) and torch.equal(read["b"], second)


@pytest.mark.parametrize("offset", [0, 64, 4096 + 64])
def test_tensors_are_read_from_their_file(tmp_path: Path, offset: int) -> None:
    tensor = torch.randn(600).half()
    path = tmp_path / "file"
    path.write_bytes(bytes(offset) + tensor.numpy().tobytes())
    place = FilePlace(path=str(path), offset=offset)
    assert torch.equal(told([named("a", tensor, place)])["a"], tensor)


def test_an_empty_tensor_and_a_scalar_arrive() -> None:
    read = told([named("none", torch.empty(0, 4)), named("one", torch.tensor(2.5))])
    assert read["none"].shape == (0, 4) and read["one"] == 2.5


def test_batches_are_bounded_and_keep_the_order() -> None:
    tensors = [named(str(n), torch.zeros(n)) for n in (2, 2, 9, 1, 1)]
    names = [[tensor.spec.name for tensor in batch] for batch in split_batches(tensors, 16)]
    assert names == [["2", "2"], ["9"], ["1", "1"]]
    assert list(split_batches([], 16)) == []


def test_errors_arrive_as_they_were() -> None:
    errors = [WorkerError(cause="no room"), WorkerError(cause="rank 1 left", broken_group=True)]
    assert decode_errors(encode_errors(errors)) == errors
    assert decode_errors(encode_errors([])) == []
