"""The bytes of a weight: little-endian, row-major, in the element type that the servers hold."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.trainer.policy import ElementType, NamedTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "WeightSource",
    "element_type_to_proto",
    "num_bytes",
    "slices",
    "tensor_bytes",
    "tensor_spec_to_proto",
]


class WeightSource(Protocol):
    """The part of `PolicyBackend` that weights come from; both methods are collective."""

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """All weights, of all senders."""
        ...

    def export_weights(self) -> Iterator[NamedTensor]:
        """The weights of this pipeline stage, in the order of the specs."""
        ...


_SIZES: dict[ElementType, int] = {"float32": 4, "bfloat16": 2}
_PROTO: dict[ElementType, pb.ElementType] = {
    "float32": pb.ELEMENT_TYPE_FLOAT32,
    "bfloat16": pb.ELEMENT_TYPE_BFLOAT16,
}


def element_type_to_proto(element_type: ElementType) -> pb.ElementType:
    """The contract's name of the type."""
    return _PROTO[element_type]


def tensor_spec_to_proto(spec: TensorSpec, element_type: ElementType) -> pb.TensorSpec:
    """The announcement of a weight that will be sent as `element_type`."""
    return pb.TensorSpec(name=spec.name, element_type=_PROTO[element_type], shape=spec.shape)


def num_bytes(spec: TensorSpec, element_type: ElementType) -> int:
    """Bytes of the weight as `element_type`."""
    return math.prod(spec.shape) * _SIZES[element_type]


def tensor_bytes(tensor: "Tensor", element_type: ElementType) -> memoryview:
    """[number of bytes]; shares the tensor's memory where no conversion is needed."""
    import torch

    wanted = torch.float32 if element_type == "float32" else torch.bfloat16
    flat = tensor.detach().to(dtype=wanted, device="cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def slices(data: memoryview, size: int) -> Iterator[tuple[int, memoryview]]:
    """(offset, part of at most `size` bytes), in order."""
    for offset in range(0, len(data), size):
        yield offset, data[offset : offset + size]
