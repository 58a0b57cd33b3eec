import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.tools import host_semaphore
from treadle.tools.host_semaphore import HostSemaphore

pytestmark = pytest.mark.asyncio

HOLDER = """
import asyncio, sys
from pathlib import Path
from treadle.tools.host_semaphore import HostSemaphore

async def main():
    async with HostSemaphore("tool", int(sys.argv[2]), directory=Path(sys.argv[1])) as limit:
        async with limit.slot():
            print("held", flush=True)
            sys.stdin.readline()
asyncio.run(main())
"""


def hold_elsewhere(directory: Path, slots: int) -> subprocess.Popen[str]:
    """Another process that holds a slot until its stdin ends, or it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory), str(slots)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


async def test_within_a_process_it_is_first_come_first_served(tmp_path: Path) -> None:
    order: list[int] = []
    held = 0

    async def use(limit: HostSemaphore, number: int) -> None:
        nonlocal held
        async with limit.slot():
            held += 1
            assert held <= 2
            order.append(number)
            await asyncio.sleep(0)
            held -= 1

    async with HostSemaphore("tool", 2, directory=tmp_path) as limit, asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(use(limit, number))
    assert order == list(range(20))


async def test_a_slot_of_another_process_is_waited_for(tmp_path: Path) -> None:
    other = hold_elsewhere(tmp_path, 1)
    try:
        async with HostSemaphore("tool", 1, directory=tmp_path) as limit:
            waiting = asyncio.create_task(limit.slot().__aenter__())
            done, _ = await asyncio.wait([waiting], timeout=0.1)
            assert not done
            assert other.stdin is not None
            other.stdin.close()
            await waiting
            assert limit.held == 1
    finally:
        other.wait()
        assert other.stdout is not None
        other.stdout.close()


async def test_a_process_that_is_killed_gives_its_slot_back(tmp_path: Path) -> None:
    other = hold_elsewhere(tmp_path, 1)
    async with HostSemaphore("tool", 1, directory=tmp_path) as limit:
        waiting = asyncio.create_task(limit.slot().__aenter__())
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        end(other)
        await waiting


async def test_who_is_not_told_of_a_free_slot_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a file that a dying process closes before it frees the locks on it."""
    monkeypatch.setattr(host_semaphore, "_LOOK_AGAIN_S", 0.01)
    other = hold_elsewhere(tmp_path, 1)
    async with HostSemaphore("tool", 1, directory=tmp_path) as limit:
        asyncio.get_running_loop().remove_reader(limit._events)
        waiting = asyncio.create_task(limit.slot().__aenter__())
        await asyncio.sleep(0)
        end(other)
        await waiting


async def test_other_names_have_limits_of_their_own(tmp_path: Path) -> None:
    async with (
        HostSemaphore("a", 1, directory=tmp_path) as a,
        HostSemaphore("b", 1, directory=tmp_path) as b,
        a.slot(),
        b.slot(),
    ):
        assert (a.held, b.held) == (1, 1)


async def test_two_limits_of_one_name_in_one_process_share_it(tmp_path: Path) -> None:
    async with (
        HostSemaphore("a", 2, directory=tmp_path) as one,
        HostSemaphore("a", 2, directory=tmp_path) as two,
    ):
        async with one.slot(), two.slot():
            waiting = asyncio.create_task(two.slot().__aenter__())
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting


async def test_whoever_waits_can_be_cancelled_and_costs_no_slot(tmp_path: Path) -> None:
    async with HostSemaphore("a", 1, directory=tmp_path) as limit:
        async with limit.slot():
            waiting = asyncio.create_task(limit.slot().__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with limit.slot():
            assert limit.held == 1


async def test_a_directory_of_someone_else_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(SetupError, match="is not a directory of this user"):
        await HostSemaphore("a", 1, directory=tmp_path / "link").__aenter__()
    with pytest.raises(ValueError, match="slots is 0"):
        HostSemaphore("a", 0)


async def test_without_inotify_it_says_so_and_keeps_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_semaphore, "_IN_MODIFY", 0)
    monkeypatch.setattr(host_semaphore, "_IN_CLOSE_WRITE", 0)  # no event: the kernel says EINVAL
    gc.collect()  # else the collector may close here what an earlier test left open
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SetupError, match=r"cannot watch .*: Invalid argument"):
        await HostSemaphore("a", 1, directory=tmp_path).__aenter__()
    assert os.listdir("/proc/self/fd") == before
