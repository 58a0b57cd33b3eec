"""With real cgroups, of version 1 or 2, where this user may make them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.tools.sandbox import LocalSandbox, Program, SandboxLimits
from treadle.tools.sandbox.isolation.cgroups import find_memory_cgroup, own_cgroup

LIMITS = SandboxLimits(memory_mib=64, processes=16, disk_mib=16, timeout_s=60)
_ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))

HOLD_IN_SOCKETS = (
    "import os, socket, time\n"
    "for _ in range(14):\n"
    "    if os.fork() == 0:\n"
    "        kept = []\n"
    "        for _ in range(28):\n"
    "            pair = socket.socketpair()\n"
    "            kept.append(pair)\n"
    "            for end in pair:\n"
    "                end.setblocking(False)\n"
    "                try:\n"
    "                    while True: end.send(bytes(4096))\n"
    "                except BlockingIOError: pass\n"
    "        time.sleep(0.5)\n"
    "        os._exit(0)\n"
    "for _ in range(14): os.wait()\n"
)
"""About 160 MiB that the kernel holds and no process shows."""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup whose children bound memory."""
    root = next((path for path in _ROOTS if (path / "cgroup.procs").exists()), None)
    if root is None or not os.access(root / "cgroup.procs", os.W_OK):
        pytest.skip("this user may make no cgroup here")
    path = root / f"treadle-test-{os.getpid()}"
    path.mkdir()
    if (path / "cgroup.subtree_control").exists():
        try:
            for each in (root, path):
                (each / "cgroup.subtree_control").write_text("+memory")
        except OSError:
            path.rmdir()
            pytest.skip("the memory controller is not to be had here")
    yield path
    path.rmdir()


async def held(sandbox: LocalSandbox) -> tuple[int | None, str]:
    execution = await sandbox.run(Program(code=HOLD_IN_SOCKETS, timeout_s=30))
    return execution.return_code, execution.stderr


@pytest.mark.asyncio
async def test_the_kernel_bounds_what_only_it_counts(user_namespaces: None, cgroup: Path) -> None:
    left = cgroup / "treadle-0"
    left.mkdir()  # by a sandbox that was killed
    async with LocalSandbox(
        limits=LIMITS, places=1, warm=0, packages=(), preload=(), cgroup=cgroup
    ) as sandbox:
        assert (sandbox.stats().memory_cgroups, sandbox.stats().worst_case_mib) == (True, 128)
        return_code, stderr = await held(sandbox)
        assert return_code == -9
        assert "the memory limit of 64 MiB for all processes and files was exceeded" in stderr
        execution = await sandbox.run(Program(code="print(6 * 7)", timeout_s=30))
        assert (execution.stdout, execution.return_code) == ("42\n", 0)
    assert [entry.name for entry in os.scandir(cgroup) if entry.is_dir()] == []


@pytest.mark.asyncio
async def test_without_a_cgroup_nothing_counts_them(user_namespaces: None) -> None:
    """What a cgroup is for; `worst_case_mib` says so."""
    async with LocalSandbox(
        limits=LIMITS, places=1, warm=0, packages=(), preload=(), cgroup=None
    ) as sandbox:
        assert not sandbox.stats().memory_cgroups
        assert await held(sandbox) == (0, "")


@pytest.mark.asyncio
async def test_a_directory_that_is_no_memory_cgroup_is_refused(tmp_path: Path) -> None:
    for directory, why in (
        (tmp_path, "do not bound memory: name one with the memory controller"),
        (tmp_path / "missing", "no cgroup can be made in .*missing: No such file"),
    ):
        with pytest.raises(SetupError, match=why):
            async with LocalSandbox(packages=(), preload=(), cgroup=directory):
                pass


@pytest.mark.asyncio
async def test_a_sandbox_makes_its_own_cgroup_where_the_kernel_lets_it(
    user_namespaces: None,
) -> None:
    with own_cgroup() as path:
        if path is None:
            pytest.skip("this user may make no cgroup here")
        left = path.with_name("treadle-sandbox-99999999-0")  # by a server that was killed
        (left / "treadle-3").mkdir(parents=True)
    async with LocalSandbox(limits=LIMITS, places=1, warm=1, packages=(), preload=()) as sandbox:
        assert not left.exists()
        assert sandbox.stats().memory_cgroups
        assert (await held(sandbox))[0] == -9
    names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    assert not [name for name in names if name.startswith(f"treadle-sandbox-{os.getpid()}-")]


V1 = "4:memory:/docker/ab\n1:cpu,cpuacct:/docker/ab\n0::/docker/ab"
V1_MOUNTS = (
    "35 31 0:32 /docker/ab /sys/fs/cgroup/memory rw,relatime master:1 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
)
V2_MOUNTS = "30 23 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


@pytest.mark.parametrize(
    ("memberships", "mounts", "found"),
    [
        (V1, V1_MOUNTS, "/sys/fs/cgroup/memory"),
        (V1.replace("ab", "ab/in"), V1_MOUNTS, "/sys/fs/cgroup/memory/in"),
        (V1.replace("ab", "cd"), V1_MOUNTS, None),
        ("0::/user.slice/a.scope\n", V2_MOUNTS, "/sys/fs/cgroup/user.slice/a.scope"),
        ("0::/\n", V1_MOUNTS.partition("\n")[0], None),
        ("", V2_MOUNTS, None),
    ],
)
def test_the_memory_cgroup_of_a_process_is_found(
    memberships: str, mounts: str, found: str | None
) -> None:
    assert find_memory_cgroup(memberships, mounts) == (found and Path(found))
