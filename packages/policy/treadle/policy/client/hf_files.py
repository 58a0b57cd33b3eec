"""The files of a Hugging Face model folder: what it is made of, and how its weights are stored.

Needs no torch.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

__all__ = [
    "ADAPTER",
    "DEQUANTISED",
    "INDEX",
    "MODEL_FILES",
    "QUANTISED_KEYS",
    "SINGLE",
    "WEIGHT_FILES",
    "copy_files",
    "missing_weights",
    "quantisation",
    "quantisation_method",
    "tensor_shapes",
    "weight_files",
]

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
WEIGHT_FILES: Final = ("model*.safetensors", INDEX)
ADAPTER: Final = "adapter"
"""Folder with the LoRA adapter in PEFT's format, beside weights that contain it."""
MODEL_FILES: Final = (
    *("config.json", "generation_config.json", "*.py", "LICENSE*"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("spiece.model", "sentencepiece*.model", "*.tiktoken", "tekken.json"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
    "*processor_config.json",
)
"""Patterns of all files of a model beside its weights; a folder may hold anything else too."""
QUANTISED_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json that describe quantised weights."""
DEQUANTISED: Final = ("fp8", "mxfp4")
"""The `quant_method` of weights that transformers reads into whole numbers, with their scales."""
_MODELOPT: Final = "hf_quant_config.json"
_WHOLE_TYPES: Final = ("F64", "F32", "F16", "BF16")


def copy_files(source: Path, target: Path, patterns: Iterable[str] = MODEL_FILES) -> None:
    """Copies the files that match into a new folder, links as what they lead to."""
    target.mkdir(parents=True)
    for file in sorted({file for pattern in patterns for file in source.glob(pattern)}):
        if file.is_file():
            place = target / file.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)


def weight_files(folder: Path) -> list[Path]:
    """Returns the files with the weights of a folder, sorted.

    Raises:
        FileNotFoundError: One is missing.
    """
    if (missing := missing_weights(folder)) is not None:
        raise FileNotFoundError(f"{folder} has {missing}")
    if not (folder / INDEX).is_file():
        return [folder / SINGLE]
    shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return sorted({folder / name for name in shards})


def missing_weights(folder: Path) -> str | None:
    """Returns which file of the weights a folder lacks, for a message; None if all are there."""
    if not (folder / INDEX).is_file():
        return None if (folder / SINGLE).is_file() else f"neither {SINGLE} nor {INDEX}"
    shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    missing = sorted(name for name in set(shards) if not (folder / name).is_file())
    return f"no {missing[0]}, which {INDEX} names" if missing else None


def quantisation(folder: Path) -> str | None:
    """Returns what shows that a folder's weights are quantised, for a message; None if nothing."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for section in (config, config.get("text_config") or {}):
        for key in QUANTISED_KEYS:
            if found := section.get(key):
                method = found.get("quant_method") if isinstance(found, dict) else found
                return f"config.json has {key} ({method})"
    if (folder / _MODELOPT).is_file():
        return f"{_MODELOPT} is beside config.json"
    for file in sorted(folder.glob(WEIGHT_FILES[0])):
        for name, tensor in _tensors(file):
            if "weight" in name and (stored := tensor["dtype"]) not in _WHOLE_TYPES:
                return f"{file.name} stores {name} as {stored}"
    return None


def quantisation_method(folder: Path) -> str | None:
    """Returns the `quant_method` of a folder's config.json; None without one."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get(QUANTISED_KEYS[0])
    return found.get("quant_method") if isinstance(found, dict) else None


def tensor_shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    """Yields the name and the shape of each tensor of a safetensors file."""
    return ((name, tensor["shape"]) for name, tensor in _tensors(file))


def _tensors(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each tensor of a safetensors file, and its entry in the header."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = stream.read(size) if size < file.stat().st_size else b"{}"
    try:
        tensors = json.loads(header)
    except ValueError:
        return  # what reads the weights refuses a damaged file
    yield from ((name, tensor) for name, tensor in tensors.items() if name != "__metadata__")
