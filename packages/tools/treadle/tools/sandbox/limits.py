"""The limits of one program; each has a number and a place that enforces it.

Invariant: every limit is set. Two of them are for the program as a whole and hold whatever it
forks: `memory_mib` and `entries` are watched by the supervisor, which ends everything; what the
rest allow one process is multiplied by `processes` at most.

    what                     where                                  when it is reached
    memory_mib, together     supervisor, every 50 ms                all ended, return code -9
    memory_mib, a process    RLIMIT_AS                              MemoryError, malloc gives NULL
    processes                RLIMIT_NPROC in a user namespace       fork gives EAGAIN
    disk_mib                 size of the two writable tmpfs         ENOSPC
    entries                  supervisor, every 50 ms                all ended, return code -9
    open_files               RLIMIT_NOFILE                          EMFILE
    output_kib, a stream     the reader outside                     all ended, return code -9
    Program.timeout_s        supervisor; the host a moment later    all ended, TimeLimitExceeded
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

_SHARED_MEMORY_MIB = 8
_SOCKET_BUFFER = Path("/proc/sys/net/core/wmem_default")
"""Bytes that one end of a Unix socket may send unread; what goes over it is at most as much."""
_CORE_NEVER = 1
"""RLIMIT_CORE: less than a page writes no file, and 1 is what also keeps a dump from a host's
pipe handler (`core_pattern` with a `|`), which 0 does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Bounds of one program.

    Attributes:
        memory_mib: Limit of all its processes and files together, and of the address space of each.
        processes: Processes and threads at one time.
        disk_mib: Limit of the files it may write; they are in memory. `/dev/shm` has 8 MiB more.
        entries: Files and directories it may make.
        output_kib: Limit of stdout, and the same of stderr.
        timeout_s: The longest `Program.timeout_s` that is accepted.
        nice: Added to the niceness of its processes.

    Raises:
        ValueError: A bound is not positive, or the memory does not hold an interpreter.
    """

    memory_mib: int = 1024
    processes: int = 32
    disk_mib: int = 64
    entries: int = 10_000
    open_files: int = 64
    output_kib: int = 1024
    timeout_s: float = 300.0
    nice: int = 5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value}; it must be above 0")
        if self.memory_mib < 64:
            raise ValueError(f"memory_mib is {self.memory_mib}; an interpreter needs 64")

    @property
    def shared_memory_mib(self) -> int:
        """Size of `/dev/shm`."""
        return _SHARED_MEMORY_MIB

    @property
    def worst_case_mib(self) -> int:
        """Memory of one program: what is watched, and socket buffers, which only counts bound."""
        buffers = self.processes * self.open_files * 2 * int(_SOCKET_BUFFER.read_text())
        return self.memory_mib + (buffers >> 20)

    def rlimits(self, *, memory_mib: int, timeout_s: float) -> dict[str, int]:
        """Returns the limits of each process, by the names of `resource`; soft and hard."""
        return {
            "AS": memory_mib << 20,
            "CORE": _CORE_NEVER,
            "CPU": math.ceil(timeout_s) + 1,
            "FSIZE": self.disk_mib << 20,
            "MEMLOCK": 64 << 10,
            "MSGQUEUE": 0,
            "NOFILE": self.open_files,
            "NPROC": self.processes + 1,  # the supervisor is one
        }
