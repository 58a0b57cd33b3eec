import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.trainer.launch.local import LocalLauncher, describe_exit
from treadle.trainer.launch.process import ProcessError, ProcessSpec, child_python_path

_PROGRAM = """
import argparse, signal, sys
from pathlib import Path
from treadle.trainer.launch.process import watch_parent, write_ready
parser = argparse.ArgumentParser()
parser.add_argument("--parent_pid", type=int)
parser.add_argument("--ready_file", type=Path)
parser.add_argument("--host")
parser.add_argument("--do", default="serve")
args = parser.parse_args()
print("doing", args.do, "on", args.host)
if args.do == "fail":
    sys.exit("the model is missing")
watch_parent(args.parent_pid)
if args.do == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.do != "mute":
    write_ready(args.ready_file, f"{args.host}:1")
signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that children can be started from."""
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
        assert await process.ready(20) == "127.0.0.1:1"
        assert await process.poll() is None
        assert "doing serve on 127.0.0.1" in await process.log_tail()
    assert await process.poll() == -signal.SIGTERM


@pytest.mark.asyncio
async def test_a_child_that_fails_is_quoted(program: str, tmp_path: Path) -> None:
    async with LocalLauncher(tmp_path / "logs") as launcher:
        process = await launcher.start(_spec(program, "fail"))
        with pytest.raises(
            ProcessError, match=r"(?s)child exited with status 1 .*model is missing"
        ):
            await process.ready(20)


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
        await process.ready(20)
        await process.stop(grace_s=0.1)
        assert await process.poll() == -signal.SIGKILL


def test_a_child_does_not_outlive_a_killed_parent(program: str, tmp_path: Path) -> None:
    parent = f"""
import asyncio
from pathlib import Path
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.launch.process import ProcessSpec

async def main():
    async with LocalLauncher(Path({str(tmp_path / "logs")!r})) as launcher:
        spec = ProcessSpec(name="child", module={program!r}, args=("--host", "h"))
        process = await launcher.start(spec)
        await process.ready(20)
        print(process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": child_python_path()},
    ) as process:
        assert process.stdout is not None
        child = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    assert asyncio.run(_ends(child))


async def _ends(pidfd: int) -> bool:
    """Waits for the end of a process that is not ours."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(10):
            await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return True


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
