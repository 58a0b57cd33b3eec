import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from treadle.policy.client.process import wait_until_ended
from treadle.trainer.config.topology import Devices
from treadle.trainer.launch.local import LocalLauncher, describe_exit
from treadle.trainer.launch.process import (
    LostProcessError,
    ProcessError,
    ProcessSpec,
    child_python_path,
)

_LONG_S = 150.0
"""Longer than the process of a test takes to start."""

_PROGRAM = """
import argparse, signal, sys
from pathlib import Path
from treadle.tracing.child_process import write_ready
parser = argparse.ArgumentParser()
parser.add_argument("--ready_file", type=Path)
parser.add_argument("--host")
parser.add_argument("--do", default="serve")
args = parser.parse_args()
print("doing", args.do, "on", args.host)
if args.do == "fail":
    sys.exit("the model is missing")
if args.do == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.do != "mute":
    write_ready(args.ready_file, f"{args.host}:1")
signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that children can run."""
    (tmp_path / "treadle_test_program.py").write_text(_PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "treadle_test_program"


def _spec(module: str, do: str) -> ProcessSpec:
    return ProcessSpec(name="child", module=module, args=("--host", "{host}", "--do", do))


@pytest.mark.asyncio
async def test_a_child_says_where_it_is_and_ends_with_the_launcher(
    program: str, tmp_path: Path
) -> None:
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(_spec(program, "serve"))
        assert await process.ready(_LONG_S) == "127.0.0.1:1"
        assert await wait_until_ended(process, 0) is None
        assert "doing serve on 127.0.0.1" in await process.log_tail()
    assert await process.wait() == -signal.SIGTERM


_FOREIGN = """
import os, sys
print("PYTHONPATH" in os.environ, "PEX_EXTRA_SYS_PATH" in os.environ, os.environ["PATH"])
sys.exit("refuses " + sys.argv[1])
"""


@pytest.mark.asyncio
async def test_a_command_sees_nothing_of_this_interpreters_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PEX_EXTRA_SYS_PATH", "/ours")
    monkeypatch.setenv("PATH", "/usr/bin")
    engine = tmp_path / "engine" / "bin"
    engine.mkdir(parents=True)
    (engine / "python").symlink_to(sys.executable)
    spec = ProcessSpec(
        name="engine",
        module="unused",
        command=(str(engine / "python"), "-c", _FOREIGN),
        args=("{host}",),
    )
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(spec)
        with pytest.raises(ProcessError, match=r"refuses 127\.0\.0\.1") as error:
            await process.ready(_LONG_S)
    assert f"False False {engine}:/usr/bin" in str(error.value)


_SHOWS = "import os, sys; sys.exit('sees ' + os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.mark.asyncio
async def test_a_child_sees_the_gpus_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    shows = (sys.executable, "-c", _SHOWS)
    spec = ProcessSpec(name="engine", module="", command=shows, devices=Devices(0, (2, 3)))
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(spec)
        with pytest.raises(ProcessError, match="sees 6,7"):
            await process.ready(_LONG_S)


@pytest.mark.asyncio
async def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = ProcessSpec(name="engine", module="unused", command=("/nowhere/server",))
    async with LocalLauncher(tmp_path / "logs") as launcher:
        with pytest.raises(ProcessError, match=r"engine: cannot run /nowhere/server: .*No such"):
            await launcher.start(spec)


@pytest.mark.asyncio
async def test_a_child_that_fails_is_quoted(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.trainer.launch.local._VMSTAT", tmp_path / "no kernel says so")
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(_spec(program, "fail"))
        with pytest.raises(
            ProcessError, match=r"(?s)child exited with status 1 .*model is missing"
        ) as error:
            await process.ready(_LONG_S)
    assert not isinstance(error.value, LostProcessError)  # it would refuse again


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("kill -9 $$", "was ended by SIGKILL"),
        ("exit 137", "exited with status 137, as after SIGKILL"),
    ],
)
async def test_a_child_that_is_killed_before_it_serves_is_lost(
    command: str, end: str, tmp_path: Path
) -> None:
    killed = ProcessSpec(name="child", module="", command=("sh", "-c", command))
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(killed)
        with pytest.raises(LostProcessError, match=f"child {end} on node"):
            await process.ready(_LONG_S)


@pytest.mark.asyncio
@pytest.mark.parametrize(("status", "is_lost"), [(1, True), (2, False)])
async def test_a_child_whose_child_is_killed_for_memory_is_lost(
    status: int, is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends the engine, which is larger; the server says so and exits."""
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 41\nnr_free_pages 7\n")
    monkeypatch.setattr("treadle.trainer.launch.local._VMSTAT", vmstat)
    ends = f"echo 'oom_kill 42' > {vmstat}; echo the engine was killed; exit {status}"
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(
            ProcessSpec(name="child", module="", command=("sh", "-c", ends))
        )
        with pytest.raises(ProcessError, match=r"(?s)before it served.*engine was kill") as error:
            await process.ready(_LONG_S)
    assert isinstance(error.value, LostProcessError) is is_lost
    told = ", while the kernel ended a process of that machine for memory; "
    assert (told in str(error.value)) is is_lost


@pytest.mark.asyncio
async def test_a_child_that_never_serves_is_given_up(program: str, tmp_path: Path) -> None:
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(_spec(program, "mute"))
        with pytest.raises(ProcessError, match=r"did not serve within 0\.2 s"):
            await process.ready(0.2)


@pytest.mark.asyncio
async def test_a_child_that_ignores_sigterm_is_killed(program: str, tmp_path: Path) -> None:
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(_spec(program, "deaf"))
        await process.ready(_LONG_S)
        await process.stop(grace_s=0.1)
        assert await process.wait() == -signal.SIGKILL


def test_the_import_path_of_children_is_absolute_and_without_the_standard_library() -> None:
    entries = child_python_path().split(os.pathsep)
    assert all(os.path.isabs(entry) for entry in entries)
    assert os.path.dirname(os.__file__) not in entries


@pytest.mark.parametrize(
    ("status", "words"),
    [(3, "exited with status 3"), (-9, "was ended by SIGKILL"), (-99, "was ended by signal 99")],
)
def test_exits_are_put_into_words(status: int, words: str) -> None:
    assert describe_exit(status) == words


@pytest.mark.asyncio
async def test_a_log_that_has_no_room_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ProcessSpec(name="child", module="unused", command=(sys.executable, "-c", "exit(1)"))
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(spec)
        with pytest.raises(ProcessError, match=r"(?s)exited with status 1 .*\n\(it is empty\)"):
            await process.ready(_LONG_S)
        usage = shutil.disk_usage(tmp_path)._replace(free=512)
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
        with pytest.raises(ProcessError, match=f"512 bytes are free on the disk of {tmp_path}"):
            await process.ready(_LONG_S)


@pytest.mark.asyncio
async def test_a_child_that_even_a_kill_does_not_end_is_left_behind(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel keeps a process that waits for a device; here the signal is not sent."""
    monkeypatch.setattr("treadle.trainer.launch.local.KILLED_S", 0.05)
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(_spec(program, "deaf"))
        await process.ready(_LONG_S)
        with monkeypatch.context() as unkillable:
            unkillable.setattr("treadle.trainer.launch.local.end_now", lambda _: None)
            await process.stop(grace_s=0.05)
        assert f"child (pid {process.pid}) does not end, 0.05 s after SIGKILL" in caplog.text
        assert await wait_until_ended(process, 0) is None
        await process.stop(grace_s=0)  # the launcher would wait for the deaf one
