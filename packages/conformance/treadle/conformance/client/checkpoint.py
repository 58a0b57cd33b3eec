"""Reads the tensors of a Hugging Face directory as updates carry them, without torch or numpy.

Files are mapped privately: a checkpoint takes no memory until it is read, and writing to its
views changes no file.
"""

import mmap
from pathlib import Path

from treadle.rollout_server.engine import NamedTensor, TensorSpec
from treadle.rollout_server.safetensors_file import read_header


def read_checkpoint(directory: Path) -> list[NamedTensor]:
    """Returns the tensors of the directory's ``*.safetensors`` files, sorted by name.

    Raises:
        OSError: A file cannot be read.
        ValueError: There are no such files, or one is malformed.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{directory} has no *.safetensors file")
    found: list[NamedTensor] = []
    for path in paths:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        found.extend(
            NamedTensor(
                spec=stored.spec,
                data=data[stored.start : stored.start + stored.spec.size_bytes],
            )
            for stored in read_header(path)
        )
    return sorted(found, key=lambda tensor: tensor.spec.name)


def specs_of(tensors: list[NamedTensor]) -> tuple[TensorSpec, ...]:
    """Returns the specs that an update of these tensors announces."""
    return tuple(tensor.spec for tensor in tensors)
