"""The bytes of a weight: little-endian, row-major, in the element type that the servers hold."""

import math
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.trainer.policy.types import ElementType, NamedTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "WeightSource",
    "chunk_message",
    "copy_into",
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

_LENGTH_DELIMITED = 2
_CHUNK_TAG = bytes([pb.PushWeightsRequest.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_DATA_TAG = bytes([pb.WeightChunk.DATA_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


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

    wanted = getattr(torch, element_type)
    flat = tensor.detach().to(dtype=wanted, device="cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def copy_into(target: memoryview, tensor: "Tensor", element_type: ElementType) -> None:
    """Writes the bytes of a weight, converting on the way: one pass over memory.

    Args:
        target: [number of bytes], writable, at least one.
        tensor: On any device.
        element_type: That the bytes become.
    """
    import torch

    held = torch.frombuffer(target, dtype=getattr(torch, element_type))
    held.view(tensor.shape).copy_(tensor.detach())


def slices(data: memoryview, size: int) -> Iterator[tuple[int, memoryview]]:
    """(offset, part of at most `size` bytes), in order."""
    for offset in range(0, len(data), size):
        yield offset, data[offset : offset + size]


def chunk_message(index: int, offset: int, part: memoryview) -> bytes:
    """A serialized `PushWeightsRequest` with one chunk, its data copied once.

    protobuf would copy them into the chunk, into the request and into the result, which takes
    longer than to send them. Its fields are written in the order of their numbers, so that the
    scalars, the tag and the length of `data` and the data make up a `WeightChunk`.

    Args:
        index: Of the tensor in the announcement.
        offset: Of the first byte in the tensor.
        part: At least one byte.
    """
    scalars = pb.WeightChunk(tensor_index=index, offset=offset, crc32=zlib.crc32(part))
    head = scalars.SerializeToString() + _DATA_TAG + _varint(len(part))
    return b"".join((_CHUNK_TAG, _varint(len(head) + len(part)), head, part))


def _varint(value: int) -> bytes:
    """https://protobuf.dev/programming-guides/encoding."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
