import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout_server.engines.common import shm_cleaner

SERVER = f"import {__name__} as test; test.server()"


def server() -> None:
    """A stand-in for a server whose engine is another process."""
    cleaner = shm_cleaner.start() if sys.argv[1] == "with" else None
    context = multiprocessing.get_context("spawn")
    semaphore = context.Semaphore()  # sem.mp-*
    here, there = context.Pipe()
    context.Process(target=engine, args=(sys.argv[2], semaphore, there)).start()
    words = map(str, (cleaner.pid if cleaner else 0, *here.recv()))
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()
    signal.pause()


def engine(other: str, semaphore: Any, told: Connection) -> None:
    """Makes what vLLM and SGLang make, and opens what belongs to somebody else."""
    theirs = shared_memory.SharedMemory(name=other)
    mine = shared_memory.SharedMemory(create=True, size=4096)  # vllm_dist_*, psm_*
    path = Path(f"/dev/shm/loads_{os.getpid()}.shm")  # sglang_loads_*: a file with a short life
    with path.open("wb") as file:
        file.truncate(4096)
        told.send((mine.name, path.name, semaphore._semlock.name.replace("/", "sem.")))
        assert theirs.buf
        signal.pause()


@pytest.fixture
def other() -> Iterator[shared_memory.SharedMemory]:
    """Shared memory of another process, this one."""
    memory = shared_memory.SharedMemory(create=True, size=4096)
    yield memory
    memory.close()
    memory.unlink()


def run(mode: str, other: str) -> tuple[subprocess.Popen[str], int, set[Path]]:
    """Starts the server; returns it, its cleaner and what its engine made."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, mode, other],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    cleaner, *names = server.stdout.readline().split()
    return server, int(cleaner), {Path("/dev/shm", name) for name in names}


def kill(server: subprocess.Popen[str]) -> None:
    """As the launcher does, which also kills multiprocessing's own cleaner."""
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    assert server.stdout is not None
    server.stdout.close()


def until_seen(cleaner: int, paths: set[Path]) -> None:
    """Waits until the cleaner holds each, which is how it remembers them."""
    left = set(map(identity, paths))
    while left:
        for entry in Path(f"/proc/{cleaner}/fd").iterdir():
            try:
                left.discard(identity(entry))
            except FileNotFoundError:
                continue


def identity(path: Path) -> tuple[int, int]:
    """Device and inode: /dev/null and the pipes have small inode numbers, as /dev/shm has."""
    found = path.stat()
    return found.st_dev, found.st_ino


def test_what_an_engine_made_goes_when_everything_of_the_server_is_killed(
    other: shared_memory.SharedMemory,
) -> None:
    server, cleaner, made = run("with", other.name)
    end = os.pidfd_open(cleaner)
    until_seen(cleaner, made)
    later = shared_memory.SharedMemory(create=True, size=4096)  # another run's, made meanwhile
    kill(server)
    select.select([end], [], [])
    os.close(end)
    try:
        assert [path for path in made if path.exists()] == []
        assert Path("/dev/shm", other.name).exists()
        assert Path("/dev/shm", later.name).exists()
    finally:
        later.close()
        later.unlink()


def test_without_it_they_stay(other: shared_memory.SharedMemory) -> None:
    """What the cleaner is for; if this fails, Python or the C library cleans up by itself."""
    server, _, made = run("without", other.name)
    kill(server)
    left = [path for path in made if path.exists()]
    for path in left:
        path.unlink()
    assert len(left) == 3
