"""Staging of weights for worker processes: the server writes files, the workers map them.

Invariant: no tensor's bytes go through a pipe. A worker receives a path and an offset, and maps
the file once, without writing to it. Tensors that are not in a file are copied into a memfd of
the server, which lives until `Staging` is closed.
"""

import asyncio
import math
import mmap
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

import torch

from treadle.rollout_server.engine import ElementType, FilePlace, NamedTensor, TensorSpec
from treadle.rollout_server.engines.common.element_types import TORCH_DTYPES
from treadle.rollout_server.tensors import TensorCheck

Entry = tuple[str, str, list[int], str, int]
"""Name, element type, shape, path and offset of a tensor, as plain values for a message."""

_ALIGNMENT = 64


class Staging:
    """Copies tensors that are not in a file into a memfd."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("treadle-weights", os.MFD_CLOEXEC)
        self._end = 0

    def entry(self, tensor: NamedTensor, *, reuse: bool = False) -> Entry:
        """Returns the entry of a tensor, with the file and offset from which a worker maps it.

        Args:
            tensor: The tensor; copied if it is not in a file.
            reuse: Whether to overwrite earlier tensors, because all workers have read them.
        """
        place = tensor.place or self._place(tensor.data, reuse=reuse)
        spec = tensor.spec
        return (spec.name, spec.element_type.value, list(spec.shape), place.path, place.offset)

    def close(self) -> None:
        """Closes the memfd; its memory is freed once no worker maps it."""
        os.close(self._memory)

    def _place(self, data: memoryview, *, reuse: bool) -> FilePlace:
        start = 0 if reuse else self._end
        self._end = start + -(-len(data) // _ALIGNMENT) * _ALIGNMENT
        written = 0
        while written < len(data):
            written += os.pwrite(self._memory, data[written:], start + written)
        return FilePlace(path=f"/proc/{os.getpid()}/fd/{self._memory}", offset=start)


@contextmanager
def staging() -> Iterator[Staging]:
    """Yields a `Staging` and closes it at the end."""
    staged = Staging()
    try:
        yield staged
    finally:
        staged.close()


async def checked_entries(
    tensors: AsyncIterator[NamedTensor],
    parameters: tuple[TensorSpec, ...] | None,
    staged: Staging,
    *,
    reuse: bool = False,
) -> AsyncGenerator[Entry, None]:
    """Yields the entry of each tensor of an update, staged on a thread.

    Args:
        parameters: The tensors that the engine must be given.
        reuse: Whether the workers read each tensor before the next one is requested.

    Raises:
        TensorMismatch: A tensor is missing, unknown, duplicated, or has the wrong shape.
    """
    check = TensorCheck(parameters)
    async for tensor in tensors:
        check.add(tensor.spec)
        yield await asyncio.to_thread(staged.entry, tensor, reuse=reuse)
    check.finish()


class MappedFiles:
    """The worker's side of `Staging`: files with tensors, each mapped once."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def tensor(self, entry: Entry) -> torch.Tensor:
        """Returns a tensor in a file; valid until `close`, or until the file changes.

        Raises:
            OSError: The file cannot be mapped.
        """
        _, kind, shape, path, offset = entry
        dtype = TORCH_DTYPES[ElementType(kind)]
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:  # An empty mapping is an error.
            return torch.empty(shape, dtype=dtype)
        memory = self._map(path, offset + num_bytes)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)
        if offset % dtype.itemsize:  # Files that we did not write may be unaligned.
            flat = flat.clone()
        return flat.view(dtype).reshape(shape)

    def close(self) -> None:
        """Releases the files; a tensor that is still referenced keeps its file mapped."""
        self._maps.clear()

    def _map(self, path: str, least: int) -> mmap.mmap:
        if path not in self._maps or len(self._maps[path]) < least:  # A file may grow.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # torch warns about read-only memory. No page of this private mapping is ever
                # written, so Linux shows what the file's owner writes.
                access = mmap.PROT_READ | mmap.PROT_WRITE
                self._maps[path] = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=access)
            finally:
                os.close(descriptor)
        return self._maps[path]
