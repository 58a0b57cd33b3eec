"""The weights under the names of a Hugging Face folder, whole, one layer after the other.

Invariant: names and shapes are those that transformers saves, which may differ from those of its
modules (it computes the experts of a layer in one tensor, and stores each by itself).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from treadle.policy.client.types import NamedTensor, TensorSpec

if TYPE_CHECKING:
    from treadle.policy.backends.fsdp.net import Net
    from treadle.policy.config.choices import ElementType


def trained_and_kept(net: Net) -> dict[str, Tensor]:
    """Returns parameters and the buffers that are stored, under their names in the module.

    What is tied to another is there once.
    """
    stored = net.model.state_dict(keep_vars=True)
    parameters = dict(net.model.named_parameters())
    buffers = dict(net.model.named_buffers())
    return parameters | {
        name: buffer
        for name, buffer in buffers.items()
        if name in stored and buffer.is_floating_point()
    }


def specs(net: Net, dtype: ElementType) -> tuple[TensorSpec, ...]:
    """Returns what `export` yields, from rank 0, without communication."""
    return tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape), element_type=dtype, sender=0)
        for part in _parts(net)
        for name, tensor in _as_stored(
            net, {name: torch.empty(t.shape, device="meta") for name, t in part.items()}
        )
    )


@torch.no_grad()
def export(net: Net, dtype: ElementType) -> Iterator[NamedTensor]:
    """Yields the tensors; collective. No more than one layer is whole at a time."""
    as_type: torch.dtype = getattr(torch, dtype)
    for part in _parts(net):
        whole = {
            name: (t.full_tensor() if isinstance(t, DTensor) else t.detach()).to(as_type)
            for name, t in part.items()
        }
        for name, tensor in _as_stored(net, whole):
            yield NamedTensor(name=name, tensor=tensor)


def _parts(net: Net) -> Iterator[dict[str, Tensor]]:
    """Yields the tensors of each layer, and those of none of them."""
    tensors = trained_and_kept(net)
    names = {id(module): name for name, module in net.model.named_modules()}
    prefixes = tuple(f"{names[id(layer)]}." for layer in net.layers())
    for prefix in prefixes:
        yield {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    yield {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def _as_stored(net: Net, part: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from revert_weight_conversion(net.model, part).items()
