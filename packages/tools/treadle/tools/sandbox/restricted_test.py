import sys

import pytest

from treadle.agent_loop import SetupError
from treadle.tools.sandbox import Program, RunStatus, UnsupportedProgramError
from treadle.tools.sandbox.restricted import RestrictedSandbox

pytestmark = pytest.mark.asyncio


async def test_small_programs_run() -> None:
    async with RestrictedSandbox(processes=1) as sandbox:
        for code, stdout, return_code, stderr in (
            ("print(6 * 7)", "42\n", 0, ""),
            ("import math\nprint(math.sqrt(2))", "1.4142135623730951\n", 0, ""),
            ("1 / 0", "", 1, "ZeroDivisionError: division by zero"),
            ("x = = 1", "", 1, "SyntaxError"),
            ("import numpy", "", 1, "No module named 'numpy'"),
            ("def f(): return f()\nf()", "", 1, "RecursionError"),
        ):
            execution = await sandbox.run(Program(code=code, timeout_s=10))
            assert (execution.stdout, execution.return_code) == (stdout, return_code)
            assert stderr in execution.stderr


async def test_time_memory_and_output_are_bounded() -> None:
    async with RestrictedSandbox(processes=1) as sandbox:
        for code in ("while True: pass", "import time\ntime.sleep(60)"):
            execution = await sandbox.run(Program(code=code, timeout_s=0.3))
            assert execution.status is RunStatus.TIMED_OUT
            assert execution.execution_s < 10
        for code in ("x = 'a' * (1 << 40)", "x = []\nwhile True: x.append('a' * 100000)"):
            execution = await sandbox.run(Program(code=code, timeout_s=20, memory_limit_mib=16))
            assert execution.return_code == 1
        # Endless output ends a program long before its time is over.
        for text, length in (("'a' * 9999", 1 << 20), ("'é'", (1 << 20) // 3 * 2)):
            execution = await sandbox.run(Program(code=f"while True: print({text})", timeout_s=300))
            assert (execution.status, execution.return_code) == (RunStatus.FINISHED, -9)
            assert "the limit of 1024 KiB of output was exceeded" in execution.stderr
            assert len(execution.stdout) == length
        full = await sandbox.run(Program(code="print('a' * ((1 << 20) - 1))", timeout_s=20))
        assert (full.return_code, len(full.stdout), full.stderr) == (0, 1 << 20, "")


async def test_nothing_of_the_host_exists() -> None:
    async with RestrictedSandbox(processes=1) as sandbox:
        for code in (
            "print(open('/etc/passwd').read())",
            "import os\nprint(os.listdir('/'))",
            "import socket\nprint(socket.socket())",
            "import subprocess\nprint(subprocess)",
            "print(().__class__.__base__.__subclasses__())",
            "from pathlib import Path\nprint(Path('/etc/passwd').read_text())",
        ):
            execution = await sandbox.run(Program(code=code, timeout_s=10))
            assert execution.return_code != 0
            assert execution.stdout == ""


async def test_programs_share_nothing() -> None:
    async with RestrictedSandbox(processes=1) as sandbox:
        await sandbox.run(Program(code="x = 1", timeout_s=10))
        assert "NameError" in (await sandbox.run(Program(code="x", timeout_s=10))).stderr


@pytest.mark.parametrize(
    "fields", [{"language": "bash"}, {"files": {"a": b""}}, {"stdin": "a"}, {"fetch_files": ("a",)}]
)
async def test_what_it_cannot_do_is_refused(fields: dict[str, object]) -> None:
    async with RestrictedSandbox(processes=1) as sandbox:
        with pytest.raises(UnsupportedProgramError, match="Python without input and files"):
            await sandbox.run(Program(code="", timeout_s=1, **fields))  # type: ignore[arg-type]


async def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(SetupError, match="pip install pydantic-monty"):
        RestrictedSandbox(processes=1)
