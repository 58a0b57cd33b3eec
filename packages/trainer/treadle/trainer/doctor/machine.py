"""Checks of the machine: limits, shared memory, memory, disk, names, ports and the sandbox."""

import asyncio
import os
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from treadle.agent_loop import SetupError
from treadle.tracing.diagnosis import Diagnosis, fail, gib, ok, warn
from treadle.trainer.launch.environment import cpu_count

__all__ = [
    "check_disk",
    "check_machine",
    "check_open_files",
    "check_proxy",
    "check_sandbox",
    "check_shared_memory",
]

_SHM_BYTES = 1 << 30  # Engines and NCCL keep queues between processes there.
_OPEN_FILES = 4096
_FEW_OPEN_FILES = 256
_DISK_BYTES = 2 << 30
_MEMORY_BYTES = 4 << 30
_WITH_LIMIT = (
    "ulimit -n 65535 in the shell, --ulimit nofile=65535 for docker, LimitNOFILE= of a unit"
)


def check_machine(environ: Mapping[str, str] = os.environ) -> Iterator[Diagnosis]:
    """Runs the checks of this module."""
    yield check_open_files(_OPEN_FILES)
    yield check_shared_memory()
    yield _memory()
    yield check_disk(Path.cwd(), _DISK_BYTES)
    yield _host_name()
    yield _loopback()
    yield check_proxy(environ)
    yield check_sandbox()


def check_open_files(wanted: int) -> Diagnosis:
    """Checks the limit of open files of this process, which its children inherit.

    Args:
        wanted: Number of file descriptors that the driver may need.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ok("open files", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    judge = fail if soft < _FEW_OPEN_FILES else warn
    return judge(
        "open files",
        str(soft),
        f"up to {wanted} are open at a time: connections of trajectories, tools and servers. "
        "Beyond the limit they fail with `OSError: [Errno 24] Too many open files`",
        _WITH_LIMIT,
    )


def check_shared_memory(path: Path = Path("/dev/shm")) -> Diagnosis:
    """Checks the size of the shared memory."""
    fix = "docker run --shm-size=32g --ipc=host; in Kubernetes an emptyDir with medium: Memory"
    try:
        status = os.statvfs(path)
    except OSError:
        return fail(str(path), "missing", "processes of an engine share memory there", fix)
    free = status.f_bavail * status.f_frsize
    if free < _SHM_BYTES:
        return warn(
            str(path),
            f"{gib(free)} free",
            "NCCL and the engines fill it, and end with `No space left on device` or a bus error",
            fix,
        )
    return ok(str(path), f"{gib(free)} free")


def check_disk(path: Path, wanted_bytes: int) -> Diagnosis:
    """Checks the free disk space where a run writes.

    Args:
        path: A directory, or one to be made.
    """
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < wanted_bytes:
        return warn(
            "disk",
            f"{gib(free)} free in {there}",
            f"checkpoints and logs may need {gib(wanted_bytes)}",
            "make room, or set run.dir to a larger disk; schedule.keep_checkpoints=1 keeps one",
        )
    return ok("disk", f"{gib(free)} free in {there}")


def _memory() -> Diagnosis:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return ok("memory", "unknown")
    value = f"{gib(free)} free, {cpu_count()} CPUs"
    if free < _MEMORY_BYTES:
        cause = "even a small model with its optimizer may not fit"
        return warn("memory", value, cause, "end other programs, or take a larger machine")
    return ok("memory", value)


def _host_name() -> Diagnosis:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return warn(
            "host name",
            name,
            f"it has no address ({error}): Gloo and Ray look it up to reach this machine",
            f"add `127.0.0.1 {name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    return ok("host name", f"{name} is {address}")


def _loopback() -> Diagnosis:
    """Connects to a free port of this machine, as driver, ranks and servers do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return ok("ports", f"127.0.0.1:{port} can be opened and reached")
    except OSError as error:
        return fail(
            "ports",
            str(error),
            "the processes of a run connect over 127.0.0.1",
            "bring up the interface lo, and allow connections of 127.0.0.1 in the firewall; "
            "net.ipv4.ip_local_port_range must leave free ports",
        )


def check_proxy(environ: Mapping[str, str]) -> Diagnosis:
    """Finds a proxy that clients would use for addresses of this machine."""
    names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    proxy = next((environ[name] for name in names if environ.get(name)), "")
    passed = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    entries = {entry.strip() for entry in passed.split(",")}
    if proxy and not entries & {"*", "127.0.0.1", "127.0.0.0/8"}:
        return warn(
            "proxy",
            proxy,
            "clients of tools on this machine (sandbox, search, judges) ask this proxy for "
            "127.0.0.1; Treadle's own connections do not",
            "export no_proxy=localhost,127.0.0.1 and NO_PROXY alike",
        )
    return ok("proxy", proxy or "none")


def check_sandbox() -> Diagnosis:
    """Runs a program in the sandbox for model-written code, as a code interpreter does."""
    try:
        from treadle.tools.sandbox import LocalSandbox, Program, SandboxError
    except ImportError as error:
        return warn(
            "sandbox",
            f"not installed ({error})",
            "tools that run model-written code on this machine need it",
            'pip install "treadle-tools[sandbox]", or give the tool a sandbox_fusion_url',
        )

    async def run() -> str:
        async with LocalSandbox(places=1, warm=0, packages=(), preload=(), cgroup=None) as sandbox:
            return (await sandbox.run(Program(code="print(6 * 7)", timeout_s=10))).stdout

    try:
        said = asyncio.run(run())
    except (SetupError, SandboxError, OSError) as error:
        return warn(
            "sandbox",
            str(error),
            "model-written code cannot be isolated here; only tools that run such code need this",
            "allow user namespaces (sysctl user.max_user_namespaces=15000; on Ubuntu also "
            "kernel.apparmor_restrict_unprivileged_userns=0; docker run --security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined), install bubblewrap, or give "
            "the tool a sandbox_fusion_url (docs/sandbox.md)",
        )
    return ok("sandbox", f"bubblewrap isolates a program, which prints {said.strip()}")
