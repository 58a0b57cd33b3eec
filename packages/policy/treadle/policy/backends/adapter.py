"""A LoRA adapter as all backends start, read, write and check it: PEFT's format.

The directory has two files, which the `peft` library (0.21) loads: adapter_config.json, and
adapter_model.safetensors with `base_model.model.<module>.lora_A.weight` [rank, inputs] and
`lora_B.weight` [outputs, rank] for each adapted matrix.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.policy.backends.vision.shape import NOT_ADAPTED
from treadle.policy.client.hf_files import ADAPTER

if TYPE_CHECKING:
    from treadle.policy.config.policy import LoraConfig

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"


class AdapterError(ValueError):
    """An adapter directory cannot be used; the message names it, the cause and the fix."""


def start(
    lora: LoraConfig, shapes: Mapping[str, tuple[int, int]], seed: int
) -> Mapping[str, Tensor]:
    """Returns A and B of every matrix by name, from `lora.path` or at random.

    At random as PEFT does: A uniform within 1 / sqrt(inputs) (`kaiming_uniform_` with a = sqrt(5)),
    B zero. Each A is drawn whole from its own generator, so that no parallel size changes it.

    Raises:
        AdapterError: The directory is missing or does not fit the settings.
    """
    if lora.path is not None:
        return _read(lora, lora.path, shapes)
    return {name: _random(name, shape, seed) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    if name.endswith(".lora_B.weight"):
        return torch.zeros(shape)
    bound = 1.0 / math.sqrt(shape[1])
    generator = torch.Generator()
    generator.manual_seed(((seed << 32) + zlib.crc32(name.encode())) % 2**63)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _read(
    lora: LoraConfig, folder: Path, expected: Mapping[str, tuple[int, int]]
) -> Mapping[str, Tensor]:
    """Returns the tensors of a directory, all of them and of the right shapes."""
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


def peft_settings(
    lora: LoraConfig, adapted: Sequence[str], *, base: str, sees: bool = False
) -> dict[str, Any]:
    """Returns the content of adapter_config.json for an adapter of these matrices.

    Args:
        sees: Whether the model has a vision tower, which has no adapters.
    """
    # PEFT finds matrices by the ends of their names, which those of the tower share.
    return ({"exclude_modules": NOT_ADAPTED} if sees else {}) | {
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


def identity(
    lora: LoraConfig, frozen: Iterable[tuple[str, Tensor]], at: torch.device
) -> dict[str, Any]:
    """Returns what a checkpoint of the adapter is valid for, by the name for an error; collective.

    The checksum of the frozen weights adds up their bits, times a number per name, so that no
    parallel size changes it.

    Args:
        frozen: This rank's parts of the frozen weights; each part is on one rank only.
    """
    total = torch.zeros((), dtype=torch.int64, device=at)
    for name, part in frozen:
        bits = part.detach().view(torch.int16 if part.itemsize == 2 else torch.int32)
        total += zlib.crc32(name.encode()) * bits.sum(dtype=torch.int64)
    dist.all_reduce(total)
    return {
        "policy.lora.rank": lora.rank,
        "policy.lora.alpha": lora.alpha,
        "policy.lora.targets": sorted(lora.targets),
        "the frozen weights' checksum": int(total),
    }
