"""What a child process prints: read through a pipe, or shown on standard error as inert text.

Invariant: no byte of a child reaches the terminal as it is; and nobody waits for a pipe that a
grandchild holds open.
"""

import asyncio
import codecs
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO

from treadle.tracing.inert import inert

_GRACE_S = 0.5


@asynccontextmanager
async def output_pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """Opens a pipe; asyncio's own would be waited for while any process holds it open.

    The caller closes the end for writing.
    """
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: protocol, os.fdopen(read_end, "rb")
    )
    try:
        yield reader, write_end
    finally:
        transport.close()


@asynccontextmanager
async def shown_output() -> AsyncIterator[BinaryIO]:
    """Yields a file for a child's output, which is shown while the block runs."""
    async with output_pipe() as (reader, write_end):
        showing = asyncio.create_task(_show(reader), name="output of a child")
        try:
            with os.fdopen(write_end, "wb") as file:
                yield file
            await asyncio.wait([showing], timeout=_GRACE_S)
        finally:
            showing.cancel()


async def _show(reader: asyncio.StreamReader) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while data := await reader.read(65536):
        sys.stderr.write(inert(decoder.decode(data)))
        sys.stderr.flush()
