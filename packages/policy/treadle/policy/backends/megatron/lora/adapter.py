"""The adapter of a policy: how it starts, and its directory in PEFT's format.

The directory has two files, which the `peft` library (0.21) loads: adapter_config.json, and
adapter_model.safetensors with `base_model.model.<module>.lora_A.weight` [rank, inputs] and
`lora_B.weight` [outputs, rank] for each adapted matrix.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.policy.backends.megatron import checkpoint, device, weights
from treadle.policy.client.hf_files import ADAPTER

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.megatron.model import PolicyModel
    from treadle.policy.backends.megatron.parallel import World
    from treadle.policy.config.policy import LoraConfig, PolicyConfig

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"


class AdapterError(ValueError):
    """An adapter directory cannot be used; the message names it, the cause and the fix."""


def start(
    model: PolicyModel, lora: LoraConfig, architecture: Architecture, world: World, *, seed: int
) -> None:
    """Fills A and B of this rank, from `lora.path` or at random.

    At random as PEFT does: A uniform within 1 / sqrt(inputs) (`kaiming_uniform_` with a = sqrt(5)),
    B zero. Each A is drawn whole from its own generator, so that no parallel size changes it.

    Raises:
        AdapterError: The directory is missing or does not fit the settings.
    """
    tensors = _RandomA(lora, architecture, seed) if lora.path is None else _read(lora, architecture)
    weights.load(weights.adapter_entries(model, architecture), tensors, architecture, world)


class _RandomA:
    """A and B of every matrix, by name, as they are before training."""

    def __init__(self, lora: LoraConfig, architecture: Architecture, seed: int) -> None:
        self._rank, self._matrices, self._seed = lora.rank, architecture.matrices, seed

    def __getitem__(self, name: str, /) -> Tensor:
        *_, matrix, letter, _ = name.split(".")
        inputs, outputs = self._matrices[matrix]
        if letter == "lora_B":
            return torch.zeros(outputs, self._rank)
        seed = ((self._seed << 32) + zlib.crc32(name.encode())) % 2**63
        generator = torch.Generator().manual_seed(seed)
        bound = 1.0 / math.sqrt(inputs)
        return torch.empty(self._rank, inputs).uniform_(-bound, bound, generator=generator)


def _read(lora: LoraConfig, architecture: Architecture) -> Mapping[str, Tensor]:
    """Returns the tensors of a directory, all of them and of the right shapes."""
    folder = lora.path
    assert folder is not None
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise AdapterError(f"policy.lora.path={folder} has no {file}: is it PEFT's directory?")
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    wanted = peft_settings(lora, (), base="")
    fixes = {"r": "set policy.lora.rank to it", "lora_alpha": "set policy.lora.alpha to it"}
    for key in ("peft_type", "bias", "use_rslora", "use_dora", *fixes):
        if (found := settings.get(key, wanted[key])) != wanted[key]:
            fix = fixes.get(key, "no other kind is supported")
            raise AdapterError(
                f"policy.lora.path={folder}: its {key} is {found!r}, not {wanted[key]!r}: {fix}"
            )
    tensors = load_file(folder / WEIGHTS)
    expected = _shapes(lora, architecture)
    for name in sorted(expected.keys() ^ tensors.keys()):
        what = "lacks" if name in expected else "also has"
        raise AdapterError(
            f"policy.lora.path={folder} {what} {name!r}: set policy.lora.targets to its matrices"
        )
    for name, shape in expected.items():
        if (found := tuple(tensors[name].shape)) != shape:
            raise AdapterError(
                f"policy.lora.path={folder}: {name!r} has shape {found}, not {shape} as the model "
                "needs: it is of another model"
            )
    return tensors


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


def peft_settings(lora: LoraConfig, adapted: Sequence[str], *, base: str) -> dict[str, Any]:
    """Returns what adapter_config.json says of an adapter of these matrices."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapted),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedAdapter:
    """An adapter on its way to a directory.

    Attributes:
        tensors: All of them under PEFT's names, on rank 0; empty elsewhere.
    """

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Writes the two files into `folder`, which exists."""
        save_file(dict(self.tensors), folder / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(self.settings, indent=2)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")

    def write_below(self, folder: Path) -> None:
        """Writes them into a separate folder below `folder`.

        Beside a model's config.json, transformers would add the adapter to weights that have it.
        """
        (folder / ADAPTER).mkdir()
        self.write(folder / ADAPTER)


def collect(
    model: PolicyModel,
    config: PolicyConfig,
    architecture: Architecture,
    world: World,
    *,
    base: Path,
) -> CollectedAdapter:
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
    settings = peft_settings(config.lora, adapted, base=str(base))
    if architecture.vision is not None:
        # PEFT finds matrices by the ends of their names, which those of the tower share.
        settings["exclude_modules"] = r".*\bvisual\b.*"
    return CollectedAdapter(tensors=tensors, settings=settings)


def identity(
    model: PolicyModel, lora: LoraConfig, architecture: Architecture, world: World
) -> dict[str, Any]:
    """Returns what a checkpoint of the adapter is valid for, by the name for an error; collective.

    The checksum of the frozen weights adds up their bits, times a number per name, so that no
    parallel size changes it.
    """
    total = torch.zeros((), dtype=torch.int64, device=device.device())
    for entry in weights.entries(model, architecture):
        split = world.split(expert=entry.expert is not None)
        copied = entry.layout.replicated and split.rank
        if entry.exported and not copied and not split.copy:
            bits = entry.parameter.detach().view(
                torch.int16 if entry.parameter.itemsize == 2 else torch.int32
            )
            total += zlib.crc32("".join(entry.hf_names).encode()) * bits.sum(dtype=torch.int64)
    dist.all_reduce(total)
    return {
        "policy.lora.rank": lora.rank,
        "policy.lora.alpha": lora.alpha,
        "policy.lora.targets": sorted(lora.targets),
        "the frozen weights' checksum": int(total),
    }
