"""The adapter of a Megatron policy: how it is filled, collected and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.policy.backends import adapter
from treadle.policy.backends.megatron import checkpoint, device, weights

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.megatron.model import PolicyModel
    from treadle.policy.backends.megatron.parallel import World
    from treadle.policy.config.policy import LoraConfig, PolicyConfig


def start(
    model: PolicyModel, lora: LoraConfig, architecture: Architecture, world: World, *, seed: int
) -> None:
    """Fills A and B of this rank; see `backends.adapter.start`."""
    tensors = adapter.start(lora, _shapes(lora, architecture), seed)
    weights.load(weights.adapter_entries(model, architecture), tensors, architecture, world)


def _shapes(lora: LoraConfig, architecture: Architecture) -> Mapping[str, tuple[int, int]]:
    """Returns the shape of every tensor of the adapter, by its name."""
    shapes = {}
    for layer in range(architecture.num_layers):
        for matrix in architecture.adapted(lora.targets):
            inputs, outputs = architecture.matrices[matrix]
            block = "mlp" if matrix.startswith(("gate", "up", "down")) else "self_attn"
            name = f"{weights.adapter_place(architecture)}.{layer}.{block}.{matrix}"
            shapes[f"{name}.lora_A.weight"] = (lora.rank, inputs)
            shapes[f"{name}.lora_B.weight"] = (outputs, lora.rank)
    return shapes


def collect(
    model: PolicyModel,
    config: PolicyConfig,
    architecture: Architecture,
    world: World,
    *,
    base: Path,
) -> adapter.CollectedAdapter:
    """Brings the adapter to rank 0, which has room for it; collective."""
    dtype: torch.dtype = getattr(torch, config.dtype)

    def entries() -> Iterator[weights.WeightEntry]:
        return weights.adapter_entries(model, architecture)

    everything = checkpoint.collect(
        weights.export(entries(), architecture, world, dtype=dtype),
        weights.specs(entries(), architecture, world, dtype=config.dtype),
        world,
    )
    tensors = {item.name: item.tensor.detach().cpu().contiguous() for item in everything}
    adapted = architecture.adapted(config.lora.targets)
    settings = adapter.peft_settings(
        config.lora, adapted, base=str(base), sees=architecture.vision is not None
    )
    return adapter.CollectedAdapter(tensors=tensors, settings=settings)


def identity(
    model: PolicyModel, lora: LoraConfig, architecture: Architecture, world: World
) -> dict[str, Any]:
    """Returns what a checkpoint of the adapter is valid for; collective."""

    def frozen() -> Iterator[tuple[str, Tensor]]:
        for entry in weights.entries(model, architecture):
            split = world.split(expert=entry.expert is not None)
            copied = entry.layout.replicated and split.rank
            if entry.exported and not copied and not split.copy:
                yield "".join(entry.hf_names), entry.parameter

    return adapter.identity(lora, frozen(), device.device())
