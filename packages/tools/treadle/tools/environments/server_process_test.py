"""The process of an environment's server: started once, and ended with all of its processes."""

import asyncio
import os
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.tools.environments.server_process import ServerProcess

_SERVER = """
import os, pathlib, socket, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with pathlib.Path(sys.argv[2]).open("a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    listener.accept()
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else gets meanwhile."""
    with socket.socket() as held:
        # With this option, which `create_server` sets too, it is not in a server's way.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_server_is_started_once_and_ended_with_its_children(tmp_path: Path, port: int) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", _SERVER, str(port), str(pids)]
    handles: list[int] = []

    async def use() -> None:
        server = ServerProcess(command, f"http://127.0.0.1:{port}")
        await asyncio.gather(server.started(), server.started())
        with socket.create_connection(("127.0.0.1", port)):
            pass
        (line,) = pids.read_text().splitlines()
        handles.extend(os.pidfd_open(int(pid)) for pid in line.split())
        await server.aclose()

    asyncio.run(use())
    assert len(handles) == 2
    for handle in handles:
        assert select.select([handle], [], [], 60)[0], "it still runs"
        os.close(handle)


def test_a_server_that_ends_is_an_error_with_its_status() -> None:
    server = ServerProcess([sys.executable, "-c", "raise SystemExit(3)"], "http://127.0.0.1:9")
    with pytest.raises(SetupError, match="ended with status 3"):
        asyncio.run(server.started())
    absent = ServerProcess(["no-such-program"], "http://127.0.0.1:9")
    with pytest.raises(SetupError, match="'no-such-program' does not start"):
        asyncio.run(absent.started())
