"""Reads and writes the tensors of a Hugging Face model folder, as a stream.

Invariant: reading holds one tensor at a time beyond what the caller keeps; writing holds one shard.
A written folder is complete or absent: it is built next to its place and renamed into it.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treadle.policy.backends.ranks import together
from treadle.policy.client.hf_files import INDEX, QUANTISED_KEYS, SINGLE, copy_files
from treadle.policy.client.types import NamedTensor

if TYPE_CHECKING:
    from treadle.policy.backends.adapter import CollectedAdapter


class WeightsReader:
    """The tensors of a folder, by name.

    Raises:
        FileNotFoundError: The folder has neither model.safetensors nor an index of shards.
    """

    def __init__(self, folder: Path) -> None:
        """Lists the files; no tensor is read yet."""
        self._folder = folder
        self._open: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self._files: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        elif (folder / SINGLE).is_file():
            self._files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}")

    def __enter__(self) -> Self:
        """Returns itself; leaving the context closes the files."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes every file that was opened."""
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def __getitem__(self, name: str) -> Tensor:
        """Returns the whole tensor in its stored precision; a KeyError names a missing one."""
        if name not in self._files:
            raise KeyError(f"{self._folder} has no tensor {name!r}")
        tensor: Tensor = self._file(self._files[name]).get_tensor(name)
        return tensor

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self._folder / name, "pt")
        return self._open[name]


def write_folder(
    tensors: Iterable[NamedTensor],
    folder: Path,
    *,
    like: Path,
    shard_bytes: int = 2 << 30,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Writes a model folder that transformers can load.

    Args:
        tensors: All weights, under their Hugging Face names, of one element type.
        like: A model folder whose `MODEL_FILES` are copied; the config gets the element type of
            the weights.
        shard_bytes: Maximum size of a file, unless one tensor is larger.
        beside: Writes more files into the folder that it is given, which is renamed afterwards.

    Raises:
        FileExistsError: `folder` exists.
        OSError: It could not be written; nothing is left behind.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; choose another place or remove it")
    building = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(building, ignore_errors=True)
    try:
        copy_files(like, building)
        element_types = _write_shards(tensors, building, shard_bytes)
        _describe_weights(building / "config.json", element_types)
        if beside is not None:
            beside(building)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def write_together(
    tensors: Iterator[NamedTensor], folder: Path, *, like: Path, adapter: CollectedAdapter | None
) -> None:
    """Does the same on rank 0, with an adapter below; every rank runs `tensors` to its end.

    Raises:
        CheckpointError: It could not be written; on every rank.
    """
    beside = None if adapter is None else adapter.write_below
    write = partial(write_folder, tensors, folder, like=like, beside=beside)

    def drain() -> None:
        deque(tensors, maxlen=0)

    together(write if dist.get_rank() == 0 else None, folder, meanwhile=drain)


def _describe_weights(config_file: Path, element_types: Set[str]) -> None:
    """Writes the type of the weights into config.json: loaders convert weights to it."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    for section in (config, config.get("text_config") or {}):
        for key in QUANTISED_KEYS:
            section.pop(key, None)  # what is written is whole
    (element_type,) = element_types
    # transformers 5 writes `dtype`; before, and for other loaders, it was `torch_dtype`.
    for key in ("dtype", "torch_dtype"):
        if key in config or key == "dtype":
            config[key] = element_type
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shards(tensors: Iterable[NamedTensor], folder: Path, shard_bytes: int) -> set[str]:
    """Writes the files; returns the element types of the tensors, as float32."""
    weight_map: dict[str, str] = {}
    element_types: set[str] = set()
    total = 0
    for number, shard in enumerate(_shards(tensors, shard_bytes), start=1):
        file = f"model-{number:05d}.safetensors"
        data = {item.name: item.tensor.detach().cpu().contiguous() for item in shard}
        save_file(data, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(data, file))
        total += sum(t.nbytes for t in data.values())
        weights = (t for t in data.values() if t.is_floating_point())
        element_types |= {str(t.dtype).removeprefix("torch.") for t in weights}
    if len(set(weight_map.values())) == 1:
        (folder / next(iter(weight_map.values()))).rename(folder / SINGLE)
        return element_types
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return element_types


def _shards(tensors: Iterable[NamedTensor], shard_bytes: int) -> Iterator[list[NamedTensor]]:
    shard: list[NamedTensor] = []
    size = 0
    for item in tensors:
        if shard and size + item.tensor.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item.tensor.nbytes
    if shard:
        yield shard
