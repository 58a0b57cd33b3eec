"""The weights that a rank sends: its share of those exported, and the bytes of each.

Bytes are little-endian and row-major, in the element type that the servers hold.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from treadle.policy.client.types import ElementType, NamedTensor, TensorSpec
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.rollout.v1 import weight_sync_service_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "WeightSource",
    "num_bytes",
    "own_weights",
    "specs_of",
    "specs_response",
    "tensor_bytes",
    "tensor_spec_to_proto",
]


class WeightSource(Protocol):
    """The part of `PolicyBackend` that weights come from. Both methods are collective."""

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Returns the specs of all weights, of all senders."""
        ...

    def export_weights(self) -> Iterator[NamedTensor]:
        """Yields the weights of this pipeline stage, in the order of the specs."""
        ...


_SIZES: dict[str, int] = {"float32": 4, "bfloat16": 2}
_PROTO: dict[str, pb.ElementType] = {
    "float32": pb.ELEMENT_TYPE_FLOAT32,
    "bfloat16": pb.ELEMENT_TYPE_BFLOAT16,
}


def own_weights(
    policy: WeightSource, specs: Sequence[TensorSpec], rank: int
) -> Iterator[tuple[int, NamedTensor]]:
    """Exports the weights and yields those that `rank` sends, with their index in `specs`.

    The export is collective: every rank must run the iterator to its end, including a rank that
    sends nothing and one whose servers are all gone.
    """
    own = {spec.name: index for index, spec in enumerate(specs) if spec.sender == rank}
    for named in policy.export_weights():
        if (index := own.get(named.name)) is not None:
            yield index, named


def tensor_spec_to_proto(spec: TensorSpec, element_type: str) -> pb.TensorSpec:
    """Returns the entry in Begin of a weight that is sent as `element_type`."""
    return pb.TensorSpec(name=spec.name, element_type=_PROTO[element_type], shape=spec.shape)


def specs_response(specs: Iterable[TensorSpec]) -> weights_pb.GetWeightSpecsResponse:
    """Returns the specs of a rank's weights as the response message."""
    return weights_pb.GetWeightSpecsResponse(
        specs=(
            weights_pb.WeightSpec(
                name=spec.name, shape=spec.shape, element_type=spec.element_type, sender=spec.sender
            )
            for spec in specs
        )
    )


def specs_of(response: weights_pb.GetWeightSpecsResponse) -> tuple[TensorSpec, ...]:
    """Returns the specs of the weights in a rank's response."""
    return tuple(
        TensorSpec(
            name=spec.name,
            shape=tuple(spec.shape),
            element_type=cast(ElementType, spec.element_type),
            sender=spec.sender,
        )
        for spec in response.specs
    )


def num_bytes(spec: TensorSpec, element_type: str) -> int:
    """Returns the size of the weight as `element_type`, in bytes."""
    return math.prod(spec.shape) * _SIZES[element_type]


def tensor_bytes(tensor: "Tensor", element_type: str) -> memoryview:
    """Returns the tensor's bytes, [number of bytes].

    They share the tensor's memory where it needs neither conversion nor a copy to the host.
    """
    import torch

    wanted = getattr(torch, element_type)
    flat = tensor.detach().to(dtype=wanted, device="cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
