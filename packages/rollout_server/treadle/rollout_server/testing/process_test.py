import os
import subprocess
import sys

import pytest

from treadle.rollout_server.testing.descendants import Descendants
from treadle.rollout_server.testing.process import ServerProcess, running_server, server_process

CHILD = """
import json, os, signal, sys
with open(sys.argv[1], "w") as ready:
    json.dump({"address": str(os.getpid())}, ready)
print("ready", flush=True)
signal.pause()
"""
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[3]])
"""

TEST = """
import signal
from treadle.rollout_server.testing.process import ServerProcess
print(ServerProcess("--engine", "fake").wait_ready().address, flush=True)
signal.pause()
"""


def test_what_the_server_started_ends_with_it() -> None:
    """Leaving the block waits for the end of all that could write to the server's output."""
    with ServerProcess(command=(sys.executable, "-c", PARENT, CHILD)) as process:
        child = int(process.wait_ready().address)
        assert os.getpgid(child) == process.popen.pid
    assert process.popen.returncode is not None


def test_a_server_that_ends_too_soon_says_what_it_wrote() -> None:
    with (
        pytest.raises(RuntimeError, match="unknown engine 'none'"),
        running_server("--engine", "none"),
    ):
        pass


def test_a_server_ends_with_a_test_that_is_killed() -> None:
    test = subprocess.Popen([sys.executable, "-c", TEST], stdout=subprocess.PIPE)
    assert test.stdout is not None and test.stdout.readline()
    left = Descendants(test.pid)
    assert left
    test.kill()
    test.wait()
    test.stdout.close()
    left.wait_gone()


@pytest.mark.asyncio
async def test_the_address_is_that_of_a_server_that_serves() -> None:
    async with server_process("--engine", "fake") as address:
        assert address.startswith("127.0.0.1:") and not address.endswith(":0")
