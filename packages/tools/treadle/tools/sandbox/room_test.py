"""Rooms with the real bubblewrap: what stays, what is bounded, and what is out of reach."""

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.tools.sandbox.execution import SandboxError
from treadle.tools.sandbox.room import ROOM_LIMITS, Room

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("user_namespaces")]


async def _bash(room: Room, command: str, *, timeout_s: float = 60.0) -> tuple[int, str]:
    result = await room.run(["bash", "-c", command], timeout_s=timeout_s)
    return result.return_code, (result.stdout + result.stderr).decode().strip()


@pytest.mark.asyncio
async def test_files_and_processes_of_a_command_are_there_for_the_next() -> None:
    async with Room() as room:
        assert await _bash(room, "id -u; mkdir -p /app; echo 42 > /app/x; echo $HOME") == (
            0,
            "0\n/root",
        )
        result = await room.run(["cat", "x"], cwd="/app", environment={"A": "b"})
        assert (result.return_code, result.stdout) == (0, b"42\n")
        # A server that is left behind keeps the output open, and answers on the room's own network.
        serve = "python3 -m http.server 8123 --directory /app & until (: </dev/tcp/localhost/8123);"
        assert (await _bash(room, f"{serve} do :; done 2>/dev/null"))[0] == 0
        get = "exec 3<>/dev/tcp/localhost/8123; printf 'GET /x HTTP/1.0\\n\\n' >&3; tail -1 <&3"
        assert await _bash(room, get) == (0, "42")
        assert await room.run(["cat"], stdin=b"\x00\xff") == replace(result, stdout=b"\x00\xff")
        both = await asyncio.gather(
            room.run(["bash", "-c", "mkfifo /f; cat /f"], timeout_s=20),
            room.run(["bash", "-c", "until [ -p /f ]; do :; done; echo met > /f"], timeout_s=20),
        )
        assert both[0].stdout == b"met\n"


@pytest.mark.asyncio
async def test_a_command_that_cannot_end_or_begin_is_a_result() -> None:
    async with Room() as room:
        result = await room.run(["bash", "-c", "sleep 60 | sleep 60"], timeout_s=0.5)
        assert (result.timed_out, result.return_code) == (True, -9)
        missing = await room.run(["/no/program"])
        assert (missing.return_code, missing.timed_out) == (126, False)
        assert b"/no/program" in missing.stderr
        nowhere = await room.run(["true"], cwd="/nowhere")
        assert b"/nowhere" in nowhere.stderr
    with pytest.raises(SandboxError, match="the room is closed"):
        await room.run(["true"])


@pytest.mark.asyncio
async def test_what_no_program_can_be_given_is_a_result() -> None:
    async with Room() as room:
        for argv, environment, problem in (
            (["echo", "a\0b"], {}, b"the argument 'a\\x00b' has a NUL character"),
            (["echo", "\ud83d"], {}, b"'\\ud83d' has half of a surrogate pair"),
            (["true"], {"A": "a\0"}, b"the environment variable 'A=a\\x00' has a NUL character"),
            (["true"], {"A=B": "x"}, b"illegal environment variable name"),  # process 1's answer
            ([], {}, b"the command is empty"),
            (["echo", "x" * (1 << 20)], {}, b"Argument list too long"),
        ):
            result = await room.run(argv, environment=environment)
            assert result.return_code == 126 and problem in result.stderr, result
        assert await _bash(room, "echo still") == (0, "still")


@pytest.mark.asyncio
async def test_no_command_keeps_later_ones_from_an_answer() -> None:
    async with Room(limits=replace(ROOM_LIMITS, processes=30, disk_mib=8, memory_mib=512)) as room:
        # No place for files, signals to process 1, outputs kept open, and one that has no end.
        await _bash(room, "head -c 400M /dev/zero > /run/room/x; chmod 000 /run/room /tmp /run")
        await _bash(room, "head -c 16M /dev/zero > /x; kill -INT 1; kill -TERM 1; kill -HUP 1")
        for _ in range(12):
            await _bash(room, "sleep 60 &")
        assert await _bash(room, "yes & echo still") == (0, "still")
        assert (await room.run(["cat"], stdin=b"x" * (1 << 20))).stdout == b"x" * (1 << 20)
        unread = await room.run(["true"], stdin=b"x" * (1 << 20))
        assert (unread.return_code, unread.stdout, unread.stderr) == (0, b"", b"")
        start = (
            "import os, time\nwhile True:\n  try: os.fork() or time.sleep(60)\n  except OSError: 0"
        )
        filling = asyncio.create_task(room.run(["python3", "-c", start], timeout_s=1))
        while not (full := await room.run(["true"])).return_code:
            pass
        assert full.return_code == 126 and b"at its limit of 30 processes" in full.stderr
        assert (await filling).timed_out
        with pytest.raises(SandboxError, match="printed more than 64 MiB"):
            await _bash(room, "exec head -c 70M /dev/zero")


@pytest.mark.asyncio
async def test_commands_are_answered_while_another_stops_all_processes() -> None:
    stop = "import os\nos.setsid()\nwhile 1:\n try: os.kill(-1, 19)\n except OSError: 0"
    async with Room() as room:
        await room.run(["bash", "-c", f'python3 -c "{stop}" & sleep 60'], timeout_s=0.5)
        for _ in range(8):
            result = await room.run(["true"], timeout_s=0.5)
            assert result.return_code in (0, -9)


@pytest.mark.asyncio
async def test_the_end_of_its_time_ends_all_process_groups_of_a_command() -> None:
    marks = [f"3{digit}.{os.getpid()}" for digit in (1, 2, 3)]
    group, session, command = (f"sleep {mark}" for mark in marks)
    async with Room() as room:
        ready = "trap '' INT; set -m"
        script = f"{ready}; {group} & setsid {session} & {command}"
        assert (await room.run(["bash", "-c", script], timeout_s=0.5)).timed_out
        assert [_running(mark) for mark in marks] == [False, True, False]
    assert not _running(marks[1])


@pytest.mark.asyncio
async def test_the_host_is_out_of_reach() -> None:
    secret = Path.home() / ".treadle_room_test"
    secret.write_text("secret")
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            async with Room() as room:
                for command in (
                    f"cat {secret}",
                    "touch /usr/x",
                    "cat /etc/shadow",
                    "kill -9 1; kill -9 1; ls -l /proc/1/exe && cat /proc/1/environ",
                    f": </dev/tcp/127.0.0.1/{port}",
                    "python3 -c 'import socket; socket.socket(40, socket.SOCK_STREAM)'",
                    "unshare -U true",
                    "mount -t tmpfs none /mnt",
                ):
                    assert (await _bash(room, command))[0] != 0, command
                assert await _bash(room, "echo still") == (0, "still")
            async with Room(network=True) as room:
                assert (await _bash(room, f": </dev/tcp/127.0.0.1/{port}"))[0] == 0
    finally:
        secret.unlink()


@pytest.mark.asyncio
async def test_too_many_files_end_the_room() -> None:
    async with Room(limits=replace(ROOM_LIMITS, entries=300)) as room:
        with pytest.raises(SandboxError, match="over the limit entries 300"):
            await _bash(room, "for i in {1..600}; do : > /tmp/$i; done; sleep 60")
        with pytest.raises(SandboxError, match="closed"):
            await room.run(["true"])


@pytest.mark.asyncio
async def test_too_much_memory_ends_the_process_or_the_room() -> None:
    take = "x = bytearray(400 << 20); x[::4096] = x[::4096]; import time; time.sleep(60)"
    async with Room(limits=replace(ROOM_LIMITS, memory_mib=128, disk_mib=64)) as room:
        try:  # the kernel, with a cgroup, or else the watch
            assert (await room.run(["python3", "-c", take])).return_code == -9
        except SandboxError as error:
            assert "over the limit memory_mib 128" in str(error)


@pytest.mark.asyncio
async def test_files_and_processes_are_bounded() -> None:
    async with Room(limits=replace(ROOM_LIMITS, disk_mib=16, processes=20)) as room:
        code, words = await _bash(room, "head -c 32M /dev/zero > /root/x")
        assert code != 0 and ("space" in words or "too large" in words.lower())
        start = "import subprocess as s; [s.Popen(['sleep', '30']) for _ in range(60)]"
        refused = await room.run(["python3", "-c", start])
        assert b"Resource temporarily unavailable" in refused.stderr


@pytest.mark.asyncio
async def test_every_process_ends_with_the_room() -> None:
    mark = f"30.{os.getpid()}"
    async with Room() as room:
        await _bash(room, f"setsid sleep {mark} & until grep -qx sleep /proc/$!/comm; do :; done")
        assert _running(mark)
        waiting = asyncio.create_task(room.run(["sleep", mark]))
    with pytest.raises(SandboxError, match="room"):
        await waiting
    assert not _running(mark)


def _running(mark: str) -> bool:
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in command.read_bytes().decode(errors="replace").split("\0"):
                return True
        except OSError:
            continue
    return False
