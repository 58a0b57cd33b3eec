"""Weights on their way to the workers: which bytes of which file each tensor is.

Invariant: no tensor's bytes go through a pipe. A worker is told a file and a place in it, and
maps the file; bytes that are in no file are copied into a memfd of our own, which lives until
this is closed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from treadle.rollout_server.engine import FilePlace, NamedTensor

Entry = tuple[str, str, list[int], str, int]
"""Name, element type, shape, path, offset: plain values, for a pipe or a message."""

_ALIGNMENT = 64


class Staging:
    """Gives tensors that are in no file a place in one."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("treadle-weights", os.MFD_CLOEXEC)
        self._end = 0

    def entry(self, tensor: NamedTensor, *, reuse: bool = False) -> Entry:
        """What a worker is told of a tensor.

        Args:
            tensor: Copied if it has no place.
            reuse: The worker has taken every tensor before this one; their place is free.
        """
        place = tensor.place or self._place(tensor.data, reuse=reuse)
        spec = tensor.spec
        return (spec.name, spec.element_type.value, list(spec.shape), place.path, place.offset)

    def close(self) -> None:
        """Frees the memory, as soon as no worker maps it."""
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
    """A `Staging`, closed at the end."""
    staged = Staging()
    try:
        yield staged
    finally:
        staged.close()
