"""A real sandbox server for tests, and a check whether this machine can run one.

Invariant: the server of `server_process` has ended when its block has. Who waits: the block's
entry, for the server's first word.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from treadle.tracing.child_process import supervised

_NAMESPACES = Path("/proc/self/ns/user")
_MOST = Path("/proc/sys/user/max_user_namespaces")
_DEBIAN = Path("/proc/sys/kernel/unprivileged_userns_clone")


def why_no_user_namespaces() -> str | None:
    """Why the kernel gives nobody a user namespace; None where it does.

    A test may be skipped for this reason and for no other: a missing bubblewrap fails.
    """
    if not _NAMESPACES.exists():
        return "the kernel has no user namespaces"
    if _MOST.exists() and int(_MOST.read_text()) == 0:
        return f"{_MOST} is 0"
    if os.geteuid() != 0 and _DEBIAN.exists() and int(_DEBIAN.read_text()) == 0:
        return f"{_DEBIAN} is 0"
    return None


def processes_in(namespace: str) -> list[str]:
    """Returns the host's processes in a pid namespace, named as by `readlink`."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/pid") == namespace:
                found.append(name)
        except OSError:  # it ended meanwhile, or is someone else's
            continue
    return found


@asynccontextmanager
async def server_process(*arguments: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Runs `python -m treadle.tools.sandbox` on a free port for as long as the block lasts.

    Yields:
        The address of its `/run_code`, and the process of its supervisor.

    Raises:
        RuntimeError: It ended before it served; the message is what it wrote.
    """
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        command = (sys.executable, "-m", "treadle.tools.sandbox", "--port", "0")
        process = await asyncio.create_subprocess_exec(
            *supervised([*command, "--ready_file", str(ready), *arguments]),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stderr is not None
        try:
            written = b""
            while b": ready: " not in written:
                line = await process.stderr.readline()
                if not line:
                    raise RuntimeError(f"the server ended: {written.decode()}")
                written += line
            yield f"{json.loads(ready.read_text())['url']}/run_code", process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.communicate()
