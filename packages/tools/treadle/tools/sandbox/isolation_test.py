"""Attempts to get out of the sandbox.

Each test looks at what would have been harmed, from outside where it lies outside; an error
message in the program proves nothing.
"""

import ctypes
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import treadle.tools.sandbox
from treadle.tools.sandbox import Execution, LocalSandbox, Program
from treadle.tools.sandbox.isolation.seccomp import compile_filter

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "correct-horse-battery"
CTYPES = (
    "import ctypes, os\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "def call(name, *a):\n"
    "    got = getattr(libc, name)(*a)\n"
    "    print(name, got, ctypes.get_errno())\n"
    "    return got\n"
)


async def run(sandbox: LocalSandbox, code: str, **fields: object) -> Execution:
    return await sandbox.run(Program(code=code, **{"timeout_s": 30, **fields}))  # type: ignore[arg-type]


async def test_no_file_of_the_host_is_there(
    sandbox: LocalSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv("SANDBOX_TEST_SECRET", SECRET)
    own = Path(treadle.tools.sandbox.__file__)
    wanted = [
        *("/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.bashrc", "/proc/1/environ"),
        *("/proc/1/root/etc/passwd", f"/proc/{os.getpid()}/environ", "/proc/self/root/etc/passwd"),
        *(
            "/proc/kcore",
            "/proc/pressure/memory",
            "/proc/kallsyms",
            "/proc/cmdline",
            "/proc/1/mem",
            "/sys/kernel",
            "/boot",
            "/home",
            "/var",
        ),
        *(str(tmp_path / "secret"), str(own), str(own.with_name("local.py"))),
    ]
    execution = await run(
        sandbox,
        "import os\n"
        f"for path in {wanted!r}:\n"
        "    try:\n"
        "        fd = os.open(path, os.O_RDONLY)\n"
        "        found = os.listdir(fd) if os.path.isdir(path) else os.read(fd, 100)\n"
        "        if found: print(path, found)\n"
        "    except OSError: pass\n"
        f"needle = {SECRET!r}[::-1].encode()[::-1]\n"
        "for top, _, names in os.walk('/'):\n"
        "    if top.startswith(('/usr', '/proc/sys', '/packages', '/tmp/run')): continue\n"
        "    for name in names:\n"
        "        path = os.path.join(top, name)\n"
        "        try:\n"
        "            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)\n"
        "            if path != '/proc/self/cmdline' and needle in os.read(fd, 1 << 20):\n"
        "                print('FOUND', path)\n"
        "            os.close(fd)\n"
        "        except OSError: pass\n"
        "print('treadle', [p for p, d, f in os.walk('/') if 'treadle' in d])\n"
        "print(dict(os.environ).get('SANDBOX_TEST_SECRET'))",
    )
    assert execution.stdout == "treadle []\nNone\n", execution.stderr


async def test_nothing_of_the_system_can_be_written(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        "import os\n"
        "places = ['/', '/usr', '/usr/bin', '/usr/lib', '/bin', '/dev', '/packages', '/proc',\n"
        "          '/proc/sys/kernel', os.path.dirname(os.__file__), '/dev/pts', '/root']\n"
        "for place in places:\n"
        "    try: open(place + '/mark', 'w'); print('WROTE', place)\n"
        "    except OSError: pass\n"
        "for name in ['/usr/bin/env', '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger',\n"
        "             '/proc/1/oom_score_adj', '/proc/sys/user/max_pid_namespaces', os.__file__]:\n"
        "    try: open(name, 'r+').write('x'); print('WROTE', name)\n"
        "    except OSError: pass\n"
        "for top in ('/tmp', '/dev/shm'): print(os.access(top, os.W_OK))",
    )
    assert execution.stdout == "True\nTrue\n", execution.stdout


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets, whose addresses have at most 107 bytes; `tmp_path` may have more."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


async def test_no_packet_leaves_and_no_socket_is_reached(
    sandbox: LocalSandbox, short_path: Path
) -> None:
    abstract = f"\0sandbox-test-{os.getpid()}"
    addresses: list[tuple[int, int, object]] = []
    listeners = []
    for family, kind, address in (
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        (socket.AF_UNIX, socket.SOCK_STREAM, str(short_path / "socket")),
        (socket.AF_UNIX, socket.SOCK_STREAM, abstract),
    ):
        listener = socket.socket(family, kind)
        listener.bind(address)
        listener.setblocking(False)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        listeners.append(listener)
        addresses.append((int(family), int(kind), listener.getsockname()))
    execution = await run(
        sandbox,
        "import socket, os\n"
        f"for family, kind, address in {addresses!r}:\n"
        "    try:\n"
        "        s = socket.socket(family, kind)\n"
        "        s.settimeout(2)\n"
        "        s.connect(address); s.send(b'x'); print('REACHED', address)\n"
        "    except OSError: pass\n"
        "for family in (2, 10, 16, 17, 38, 40, 44):\n"
        "    for make in (socket.socket, socket.socketpair):\n"
        "        try: make(family, socket.SOCK_DGRAM); print('SOCKET', family)\n"
        "        except PermissionError: pass\n"  # others come from the protocol, once it is asked
        "print(open('/proc/net/route').read().count('\\n'))\n"
        "try: socket.getaddrinfo('example.com', 80); print('RESOLVED')\n"
        "except OSError: print('offline')",
    )
    for listener in listeners:
        with listener, pytest.raises(BlockingIOError):
            listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept()
    assert execution.stdout == "1\noffline\n", execution.stderr


async def test_nothing_can_be_traced_or_read(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        CTYPES + "victim = os.fork()\n"
        "if victim == 0:\n"
        "    import time\n"
        "    time.sleep(60)\n"
        "call('ptrace', 0, 0, 0, 0)\n"
        "call('ptrace', 16, victim, 0, 0)\n"
        "call('ptrace', 0x4206, 1, 0, 0)\n"
        "buffer = ctypes.create_string_buffer(64)\n"
        "call('process_vm_readv', victim, buffer, 1, buffer, 1, 0)\n"
        "call('process_vm_writev', 1, buffer, 1, buffer, 1, 0)\n"
        "call('syscall', 438, call('syscall', 434, 1, 0), 0, 0)\n"
        "for name in ('mem', 'maps', 'environ', 'fd/3', 'fd/0', 'root', 'cwd', 'ns/pid'):\n"
        "    try: os.open(f'/proc/1/{name}', os.O_RDONLY); print('OPENED', name)\n"
        "    except OSError: pass\n",
    )
    lines = [line.split() for line in execution.stdout.splitlines()]
    assert [name for name, *_ in lines] == [
        *("ptrace", "ptrace", "ptrace", "process_vm_readv", "process_vm_writev"),
        *("syscall", "syscall"),
    ]
    # pidfd_open gives a handle to process 1, with which nothing can be done.
    assert [got for _, got, _ in lines if got != "-1"] == [lines[5][1]]


async def test_a_setuid_program_gives_no_rights(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        "import os, shutil, subprocess\n"
        "shutil.copy('/usr/bin/id', 'mine')\n"
        "os.chmod('mine', 0o6755)\n"
        "print(subprocess.run(['./mine', '-u'], capture_output=True, text=True).stdout.strip())\n"
        "for change in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]),\n"
        "               lambda: os.chown('mine', 0, 0), lambda: os.mknod('d', 0o20666, 0x103)):\n"
        "    try: change(); print('CHANGED')\n"
        "    except OSError: pass\n"
        "status = open('/proc/self/status').read()\n"
        "print({l.split()[1] for l in status.splitlines() if l.startswith('Cap')})\n"
        "print([l.split()[1] for l in status.splitlines() if l.startswith('NoNewPrivs')])\n"
        "mounts = [l.split()[5] for l in open('/proc/self/mountinfo')]\n"
        "print([m for m in mounts if 'nosuid' not in m])\n",
    )
    assert execution.stdout == "65534\n{'0000000000000000'}\n['1']\n[]\n", execution.stderr


NAMESPACES = CTYPES + (
    "for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x02000000):\n"
    "    call('unshare', flag)\n"
    "call('setns', os.open('/proc/self/ns/user', 0), 0)\n"
    "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)\n"
    "call('mount', b'/', b'/tmp', None, 4096, None)\n"
    "call('umount2', b'/proc', 2)\n"
    "call('chroot', b'/tmp')\n"
    "call('pivot_root' if hasattr(libc, 'pivot_root') else 'chroot', b'/tmp', b'/tmp')\n"
    "call('syscall', 428, -100, b'/', 1)\n"
    "call('syscall', 430, b'tmpfs', 0)\n"
    "child = call('syscall', 56 if os.uname().machine == 'x86_64' else 220,"
    " 0x10000011, 0, 0, 0, 0)\n"
    "if child == 0: os._exit(0)\n"
)


async def test_no_namespace_is_made_entered_or_changed(sandbox: LocalSandbox) -> None:
    execution = await run(sandbox, NAMESPACES)
    results = [line.split()[1] for line in execution.stdout.splitlines()]
    assert len(results) == 15
    assert set(results) == {"-1"}


async def test_that_holds_without_the_filter_of_system_calls(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer alone: bubblewrap's --disable-userns and the missing capabilities."""
    assert sandbox._filter == compile_filter()
    monkeypatch.setattr(sandbox, "_filter", compile_filter()[-8:])  # "allow"
    execution = await run(sandbox, NAMESPACES)
    results = [line.split()[1] for line in execution.stdout.splitlines()]
    assert len(results) == 15
    assert set(results) == {"-1"}


async def test_links_lead_nowhere(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    execution = await run(
        sandbox,
        "import os\n"
        f"os.symlink({str(tmp_path / 'secret')!r}, 'a')\n"
        "os.symlink('/etc/passwd', 'b')\n"
        "os.symlink('/proc/1', 'c')\n"
        "os.symlink('/usr/bin', 'd')\n"
        "os.symlink('../../etc', 'e')\n"
        "os.symlink('/dev/zero', 'f')\n"
        "os.mkfifo('g')\n"
        "os.symlink('h', 'h')\n"
        "open('/tmp/outside', 'w').write('x')\n"
        "os.symlink('/tmp/outside', 'i')\n"
        "open('chain', 'w').write('z')\n"
        "for n in range(1200): os.symlink(f'n{n - 1}' if n else 'chain', f'n{n}')\n"
        "open('fine', 'w').write('y')\n"
        "os.truncate(os.open('huge', os.O_RDWR | os.O_CREAT), 1 << 40)\n",
        fetch_files=(
            "a",
            "b",
            "c/environ",
            "d/env",
            "e/passwd",
            "f",
            "g",
            "h",
            "i",
            "huge",
            "n1199",
            "n20",
            "fine",
        ),
    )
    assert "RecursionError" not in execution.stderr
    assert execution.files.pop("n20") == b"z"  # type: ignore[attr-defined]
    assert execution.files == {"huge": b"", "fine": b"y"}  # it could not be made huge


async def test_absolute_paths_to_fetch_are_the_sandboxs(
    sandbox: LocalSandbox, tmp_path: Path
) -> None:
    """And show nothing that the program could not read: process 1, which fetches, can more."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o644)
    execution = await run(
        sandbox,
        "import os\n"
        "open('/tmp/fine', 'w').write('y')\n"
        "open('/mnt/fine', 'w').write('z')\n"
        "os.symlink('/proc/self/environ', '/tmp/a')\n"
        "os.symlink('/proc/1/cmdline', '/tmp/b')\n",
        fetch_files=(
            "/tmp",
            "/tmp/fine",
            "/mnt/fine",
            "/tmp/a",
            "/tmp/b",
            "/proc/1/environ",
            "/proc/self/maps",
            "/proc/self/fd/0",
            "/dev/random",
            "/no/such",
            str(secret),
        ),
    )
    assert execution.stderr == ""
    assert execution.files == {"/tmp/fine": b"y", "/mnt/fine": b"z"}


async def test_a_path_of_the_host_is_one_in_the_sandbox(
    sandbox: LocalSandbox, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    execution = await run(
        sandbox,
        f"import os\nos.makedirs({str(tmp_path)!r}, exist_ok=True)\nopen({str(mark)!r}, 'w')\n"
        if tmp_path.is_relative_to("/tmp")
        else f"try: open({str(mark)!r}, 'w')\nexcept OSError: pass",
    )
    assert execution.return_code == 0
    assert os.listdir(tmp_path) == []


async def test_nobody_elses_limits_or_priority_change(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        "import os, resource\n"
        "for limit in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):\n"
        "    try: resource.prlimit(1, limit, (0, 0)); print('LIMITED')\n"
        "    except OSError: pass\n"
        "for change in (lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),\n"
        "               lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),\n"
        "               lambda: os.sched_setaffinity(1, {0}),\n"
        "               lambda: os.setpriority(os.PRIO_USER, 0, 19),\n"
        "               lambda: os.setpriority(os.PRIO_PGRP, 0, 19)):\n"
        "    try: change(); print('CHANGED')\n"
        "    except OSError: pass\n"
        "os.setpriority(os.PRIO_PROCESS, 0, 19)\n"
        "print(os.getpriority(os.PRIO_PROCESS, 1), os.getpriority(os.PRIO_PROCESS, 0))",
    )
    assert execution.stdout == f"{os.nice(0)} 19\n", execution.stderr


async def test_signals_reach_nobody_outside(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        "import os, signal\n"
        f"for pid in ({os.getpid()}, {os.getppid()}, 1, os.getppid(), -1, -{os.getpgrp()}):\n"
        "    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):\n"
        "        try: os.kill(pid, number)\n"
        "        except OSError: pass\n"
        "print('alive')",
    )
    assert execution.stdout == "alive\n"  # and so are we, and the supervisor that said so
    assert execution.return_code == 0


async def test_no_descriptor_is_inherited(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        "import os\n"
        "for fd in range(3, 4096):\n"
        "    try: os.write(fd, b'0 itself 0.0\\n'); print('WROTE', fd)\n"
        "    except OSError: pass\n"
        "for fd in range(64):\n"
        "    for pid in ('1', 'self', 'thread-self'):\n"
        "        try: link = os.readlink(f'/proc/{pid}/fd/{fd}')\n"
        "        except OSError: continue\n"
        "        if fd > 2 and not link.startswith('/proc'): print('SAW', pid, fd, link)\n"
        "os._exit(5)",
    )
    assert (execution.stdout, execution.return_code) == ("", 5)


async def test_devices_are_the_harmless_ones(sandbox: LocalSandbox) -> None:
    execution = await run(sandbox, "import os\nprint(sorted(os.listdir('/dev')))")
    harmless = "fd full null random shm stderr stdin stdout urandom"
    assert set(eval(execution.stdout)) == set(harmless.split())
    execution = await run(
        sandbox,
        "import fcntl, pty\n"
        "try: pty.openpty(); print('TERMINAL')\n"
        "except OSError: pass\n"
        "for request in (0x5412, 0x541C):\n"
        "    for fd in range(3):\n"
        "        try: fcntl.ioctl(fd, request, b'x'); print('TYPED')\n"
        "        except OSError: pass\n"
        "print(len(open('/dev/urandom', 'rb').read(9)), open('/dev/null').read())",
    )
    assert execution.stdout == "9 \n", execution.stderr


async def test_the_host_of_these_tests_could_be_harmed() -> None:
    """The attempts above fail in the sandbox and not everywhere."""
    libc = ctypes.CDLL(None)
    descriptor = libc.memfd_create(b"a", 0)
    assert descriptor >= 0
    os.close(descriptor)
