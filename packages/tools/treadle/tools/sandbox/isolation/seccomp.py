"""The system call filter of a sandboxed program, as the BPF that bubblewrap's `--seccomp` reads.

Invariant: a program under the filter can neither trace nor reach into another process, nor change
its limits or its share of the processor (process 1's, say), nor mount, make or enter a namespace,
open sockets other than Unix ones, or take what all users of the host share a count of (inotify,
aio). Nor does it get memory that nothing here counts: memfd, System V, message queues, anonymous
memory that is shared (which outlives its mapping's pages), files' pages held by pipes and sockets
after the file is gone, larger socket buffers, Landlock rules. Calls newer than the list was
written against do not exist for it. Everything else passes: namespaces, limits and the read-only
system confine it.

    denied = EPERM | unknown number, clone3 = ENOSYS (libc then uses clone) | other ABI = killed

The assembler is our own: two dozen lines, against a binding that wants libseccomp on the host.
Instructions: linux/filter.h. Numbers: asm/unistd_64.h (x86_64), asm-generic/unistd.h (aarch64);
from 424 on they are the same.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
_JUMP_EQUAL: Final = 0x15
_JUMP_GREATER_EQUAL: Final = 0x35
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_REFUSE: Final = _ERRNO | errno.EPERM
_KILL: Final = 0x80000000  # the whole process

# Offsets in struct seccomp_data; the low halves of 64-bit arguments on little-endian machines.
_NUMBER, _ARCHITECTURE = 0, 4
_ARGUMENTS: Final = (16, 24, 32, 40)

_FIRST_UNKNOWN: Final = 463  # Linux 6.11
_CLONE_NAMESPACES: Final = 0x7E020080  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET and TIME
_AF_UNIX: Final = 1
_AF_INTERNET: Final = (2, 10)
_SHARED_ANONYMOUS: Final = 0x21  # MAP_SHARED | MAP_ANONYMOUS; MAP_SHARED_VALIDATE has the bit
_HUGE_PAGES: Final = 0x40000  # MAP_HUGETLB: pages that someone on the host has set aside
_TERMINAL_INPUT: Final = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_SOCKET_MEMORY: Final = (7, 8, 26, 50)  # SO_SNDBUF, SO_RCVBUF, SO_ATTACH_FILTER, SO_ATTACH_BPF

_SAME_EVERYWHERE: Final = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "statmount": 457,
    "listmount": 458,
    "lsm_set_self_attr": 460,
}
_CLONE3: Final = 435

# name: (x86_64, aarch64)
_BY_ARCHITECTURE: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "acct": (163, 89),
        "add_key": (248, 217),
        "adjtimex": (159, 171),
        "bpf": (321, 280),
        "chroot": (161, 51),
        "clock_adjtime": (305, 266),
        "clock_settime": (227, 112),
        "delete_module": (176, 106),
        "fanotify_init": (300, 262),
        "finit_module": (313, 273),
        "init_module": (175, 105),
        "inotify_init1": (294, 26),
        "io_setup": (206, 0),
        "kcmp": (312, 272),
        "kexec_file_load": (320, 294),
        "kexec_load": (246, 104),
        "keyctl": (250, 219),
        "lookup_dcookie": (212, 18),
        "memfd_create": (319, 279),
        "migrate_pages": (256, 238),
        "mount": (165, 40),
        "move_pages": (279, 239),
        "mq_open": (240, 180),
        "msgget": (68, 186),
        "name_to_handle_at": (303, 264),
        "nfsservctl": (180, 42),
        "open_by_handle_at": (304, 265),
        "perf_event_open": (298, 241),
        "personality": (135, 92),
        "pivot_root": (155, 41),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "ptrace": (101, 117),
        "quotactl": (179, 60),
        "reboot": (169, 142),
        "request_key": (249, 218),
        "semget": (64, 190),
        "sendfile": (40, 71),
        "setdomainname": (171, 162),
        "sethostname": (170, 161),
        "setns": (308, 268),
        "settimeofday": (164, 170),
        "shmget": (29, 194),
        "splice": (275, 76),
        "swapoff": (168, 225),
        "swapon": (167, 224),
        "syslog": (103, 116),
        "tee": (276, 77),
        "umount2": (166, 39),
        "unshare": (272, 97),
        "userfaultfd": (323, 282),
        "vhangup": (153, 58),
        "vmsplice": (278, 75),
    }
)
_CALLER: Final = ((0, 0),)
# name: (x86_64, aarch64, (argument, the value with which the call means the caller alone)).
_OF_PROCESSES: Final[Mapping[str, tuple[int, int, tuple[tuple[int, int], ...]]]] = MappingProxyType(
    {
        "ioprio_set": (251, 30, ((0, 1), (1, 0))),  # not its group or user: process 1 is of both
        "prlimit64": (302, 261, _CALLER),
        "sched_setaffinity": (203, 122, _CALLER),
        "sched_setattr": (314, 274, _CALLER),
        "sched_setparam": (142, 118, _CALLER),
        "sched_setscheduler": (144, 119, _CALLER),
        "setpriority": (141, 140, ((0, 0), (1, 0))),
    }
)
_X86_64_ONLY: Final = {
    "_sysctl": 156,
    "create_module": 174,
    "get_kernel_syms": 177,
    "inotify_init": 253,
    "ioperm": 173,
    "iopl": 172,
    "modify_ldt": 154,
    "query_module": 178,
    "sysfs": 139,
    "uselib": 134,
    "ustat": 136,
    "vserver": 236,
}
_X32_BIT: Final = 0x40000000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """A processor: its AUDIT_ARCH_*, its column above, and calls whose arguments matter."""

    architecture: int
    column: int
    clone: int
    socket: int
    socketpair: int
    setsockopt: int
    ioctl: int
    mmap: int


_MACHINES: Final[Mapping[str, _Machine]] = MappingProxyType(
    {
        "x86_64": _Machine(
            architecture=0xC000003E,
            column=0,
            clone=56,
            socket=41,
            socketpair=53,
            setsockopt=54,
            ioctl=16,
            mmap=9,
        ),
        "aarch64": _Machine(
            architecture=0xC00000B7,
            column=1,
            clone=220,
            socket=198,
            socketpair=199,
            setsockopt=208,
            ioctl=29,
            mmap=222,
        ),
    }
)


class UnsupportedMachineError(Exception):
    """No filter exists for this processor."""


def denied_calls(machine: str) -> dict[str, int]:
    """Returns the system calls that are refused whatever their arguments, by name."""
    column = _described(machine).column
    denied = {name: numbers[column] for name, numbers in _BY_ARCHITECTURE.items()}
    if machine == "x86_64":
        denied |= _X86_64_ONLY
    return denied | _SAME_EVERYWHERE


def calls_on_oneself(machine: str) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
    """Returns the calls allowed on the caller only: their number, and arguments that name it."""
    column = _described(machine).column
    return {name: (row[:2][column], row[2]) for name, row in _OF_PROCESSES.items()}


def compile_filter(machine: str | None = None, *, internet: bool = False) -> bytes:
    """Returns the filter as an array of `struct sock_filter`.

    Args:
        machine: A value of `platform.machine()`; None for this one.
        internet: Whether sockets may be IPv4 and IPv6 ones, beside Unix ones.

    Raises:
        UnsupportedMachineError: The list of its system calls is missing here.
    """
    machine = machine or platform.machine()
    about = _described(machine)
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        *_return_unless_equal(about.architecture, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += _return_if(_JUMP_GREATER_EQUAL, _X32_BIT, _KILL)
    program += _return_if(_JUMP_GREATER_EQUAL, _FIRST_UNKNOWN, _ERRNO | errno.ENOSYS)
    program += _return_if(_JUMP_EQUAL, _CLONE3, _ERRNO | errno.ENOSYS)
    for number in sorted(denied_calls(machine).values()):
        program += _return_if(_JUMP_EQUAL, number, _REFUSE)
    program += _when_called(about.clone, (0, _none_of_the_bits(_CLONE_NAMESPACES)))
    families = (_AF_UNIX, *_AF_INTERNET) if internet else (_AF_UNIX,)
    for number in (about.socket, about.socketpair):
        program += _when_called(number, (0, _one_of(families)))
    program += _when_called(about.setsockopt, (2, _none_of(_SOCKET_MEMORY)))
    program += _when_called(about.ioctl, (1, _none_of(_TERMINAL_INPUT)))
    flags = (_not_all_of_the_bits(_SHARED_ANONYMOUS), _none_of_the_bits(_HUGE_PAGES))
    program += _when_called(about.mmap, *((3, check) for check in flags))
    for number, caller in calls_on_oneself(machine).values():
        checks = ((place, _return_unless_equal(value, _REFUSE)) for place, value in caller)
        program += _when_called(number, *checks)
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def _described(machine: str) -> _Machine:
    try:
        return _MACHINES[machine]
    except KeyError:
        raise UnsupportedMachineError(
            f"no system call filter for {machine!r}; there is one for {', '.join(_MACHINES)}"
        ) from None


def _instruction(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, constant)


def _return_if(test: int, constant: int, verdict: int) -> list[bytes]:
    return [_instruction(test, constant, 0, 1), _instruction(_RETURN, verdict)]


def _return_unless_equal(constant: int, verdict: int) -> list[bytes]:
    return [_instruction(_JUMP_EQUAL, constant, 1, 0), _instruction(_RETURN, verdict)]


def _one_of(values: Sequence[int]) -> list[bytes]:
    allowed = [part for value in values for part in _return_if(_JUMP_EQUAL, value, _ALLOW)]
    return [*allowed, _instruction(_RETURN, _REFUSE)]


def _none_of(values: Sequence[int]) -> list[bytes]:
    return [part for value in values for part in _return_if(_JUMP_EQUAL, value, _REFUSE)]


def _none_of_the_bits(mask: int) -> list[bytes]:
    return [_instruction(_AND, mask), *_return_unless_equal(0, _REFUSE)]


def _not_all_of_the_bits(mask: int) -> list[bytes]:
    return [_instruction(_AND, mask), *_return_if(_JUMP_EQUAL, mask, _REFUSE)]


def _when_called(number: int, *checks: tuple[int, list[bytes]]) -> list[bytes]:
    """Checks, each of an argument, for one call, which then passes; skipped for the others."""
    body = []
    for argument, check in checks:
        body += [_instruction(_LOAD, _ARGUMENTS[argument]), *check]
    body.append(_instruction(_RETURN, _ALLOW))
    return [_instruction(_JUMP_EQUAL, number, 0, len(body)), *body]
