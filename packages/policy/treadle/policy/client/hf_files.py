"""The files of the weights in a Hugging Face model folder. Needs no torch."""

import json
from pathlib import Path
from typing import Final

__all__ = ["ADAPTER", "INDEX", "SINGLE", "missing_weights", "weight_files"]

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
ADAPTER: Final = "adapter"
"""Folder with the LoRA adapter in PEFT's format, beside weights that contain it."""


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
