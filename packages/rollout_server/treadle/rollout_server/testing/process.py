"""A real server in a process of its own."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def server_process(*arguments: str) -> AsyncIterator[str]:
    """Runs ``python -m treadle.rollout_server`` for as long as the block lasts.

    Args:
        arguments: Of its command line.

    Yields:
        Its address.

    Raises:
        RuntimeError: It ended before it served; the message is what it wrote.
    """
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "treadle.rollout_server", "--ready_file", str(ready)),
            *arguments,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            written = b""
            while b": ready" not in written:
                line = await process.stderr.readline()
                if not line:
                    raise RuntimeError(f"the server ended: {written.decode()}")
                written += line
            yield json.loads(ready.read_text())["address"]
        finally:
            if process.returncode is None:
                process.terminate()
            await process.communicate()
