"""Files mapped by a worker: the tensors that a server's `Staging` has told it of.

Invariant: a file is mapped once, and never written to.
"""

import math
import mmap
import os

import torch

from treadle.rollout_server.engine import ElementType
from treadle.rollout_server.engines.common.element_types import TORCH_DTYPES
from treadle.rollout_server.engines.common.staging import Entry


class MappedFiles:
    """Files that hold tensors, each mapped once, never written to."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def tensor(self, entry: Entry) -> torch.Tensor:
        """A tensor in a file; good until `close`, or until the file changes.

        Raises:
            OSError: The file cannot be mapped.
        """
        _, kind, shape, path, offset = entry
        dtype = TORCH_DTYPES[ElementType(kind)]
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:  # There is nothing to map.
            return torch.empty(shape, dtype=dtype)
        memory = self._map(path, offset + num_bytes)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)
        if offset % dtype.itemsize:  # As in a file of somebody else's.
            flat = flat.clone()
        return flat.view(dtype).reshape(shape)

    def close(self) -> None:
        """Lets go of the files; a tensor that is still held keeps its own mapped."""
        self._maps.clear()

    def _map(self, path: str, least: int) -> mmap.mmap:
        if path not in self._maps or len(self._maps[path]) < least:  # A file may grow.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Private and writable is what torch takes without a warning. As no page is
                # written to, Linux shows what the file's owner writes.
                access = mmap.PROT_READ | mmap.PROT_WRITE
                self._maps[path] = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=access)
            finally:
                os.close(descriptor)
        return self._maps[path]
