"""The output of a sandbox through one pipe, up to a limit.

Invariant: nobody waits for the end of the pipe once a program has run. A program can leave the
other end in flight between two Unix sockets that hold each other; it then outlives every process,
until the kernel collects it, which on a quiet host takes minutes. So a capture ends with `close`,
after the last process has.

Who waits: the caller of `until`, for a pipe that only our own code writes to.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

_CHUNK: Final = 1 << 16


class Capture:
    """The first bytes of a pipe, read from now until `close`.

    Args:
        descriptor: The end to read from; closed with the capture.
        over: Is set when there are more.

    Attributes:
        full: Whether there were more than the limit.
        ended: Whether the end of the pipe was seen.
    """

    def __init__(self, descriptor: int, limit: int, over: asyncio.Event) -> None:
        self._descriptor = descriptor
        self._limit = limit
        self._over = over
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.kept = bytearray()
        self.full = self.ended = False
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    async def until(self, mark: bytes) -> bool:
        """Waits for a mark or for the end of the pipe; returns whether the mark came."""
        while mark not in self.kept and not self.ended:
            self._news.clear()
            await self._news.wait()
        return mark in self.kept

    async def until_end(self) -> None:
        """Waits for the end of the pipe; for use while no program has run, see above."""
        while not self.ended:
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        """Takes what is still in the pipe, and lets go of it; nobody writes any more."""
        while self._read():
            pass
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def text(self) -> str:
        """Returns what was kept, as UTF-8 with U+FFFD for bytes that are none."""
        return self.kept.decode(errors="replace")

    def _read(self) -> bool:
        """Reads once; returns whether there was something."""
        try:
            part = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        self._news.set()
        if not part:
            self.ended = True
            self._loop.remove_reader(self._descriptor)
            return False
        room = self._limit - len(self.kept)
        self.kept += part[:room]
        if len(part) > room:
            self.full = True
            self._over.set()
        return True
