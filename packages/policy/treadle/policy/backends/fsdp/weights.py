"""The weights under the names of a Hugging Face folder, whole, one layer after the other.

Invariant: names and shapes are those that transformers saves, which may differ from those of its
modules (it computes the experts of a layer in one tensor, and stores each by itself).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from treadle.policy.client.types import NamedTensor, TensorSpec

if TYPE_CHECKING:
    from torch import nn

    from treadle.policy.backends.fsdp.net import Net
    from treadle.policy.config.choices import ElementType


def trained_and_kept(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and the buffers that are stored, under their names in the module.

    What is tied to another is there once.
    """
    stored = module.state_dict(keep_vars=True)
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
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
            net, {name: torch.empty(t.shape, device="meta") for name, t in part.items()}, dtype
        )
    )


@torch.no_grad()
def export(net: Net, dtype: ElementType) -> Iterator[NamedTensor]:
    """Yields the tensors; collective. No more than one layer is whole at a time."""
    for part in _parts(net):
        gathered = {name: whole(tensor) for name, tensor in part.items()}
        for name, tensor in _as_stored(net, gathered, dtype):
            yield NamedTensor(name=name, tensor=tensor)


def constants(net: Net) -> Iterator[NamedTensor]:
    """Yields what is stored beside weights and never trained: tables of numbers of experts."""
    stored, buffers = net.model.state_dict(), net.model.named_buffers()
    tables = {n: b for n, b in buffers if n in stored and not b.is_floating_point()}
    for name, table in revert_weight_conversion(net.model, tables).items():
        yield NamedTensor(name=name, tensor=table)


def whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor that ranks may have parts of; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _parts(net: Net) -> Iterator[dict[str, Tensor]]:
    """Yields the tensors of each layer, and those of none of them."""
    tensors = trained_and_kept(net.model)
    names = {id(module): name for name, module in net.model.named_modules()}
    prefixes = tuple(f"{names[id(layer)]}." for layer in net.layers())
    for prefix in prefixes:
        yield {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    yield {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def _as_stored(
    net: Net, part: Mapping[str, Tensor], dtype: ElementType
) -> Iterator[tuple[str, Tensor]]:
    as_type: torch.dtype = getattr(torch, dtype)
    typed = {name: t.to(as_type) for name, t in _merged(part, net.lora_scaling).items()}
    yield from revert_weight_conversion(net.model, typed).items()


def _merged(part: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """Returns weights without adapters, which are added to them: W + s B A."""
    found = {}
    for name, tensor in part.items():
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            a, b = (part[f"{stem}.lora_{letter}.default.weight"] for letter in "AB")
            found[f"{stem}.weight"] = tensor + scaling * (b @ a)
        elif ".lora_" not in name:
            found[name.replace(".base_layer.", ".")] = tensor
    return found
