import errno
import struct

import pytest

from treadle.tools.sandbox.isolation.seccomp import (
    UnsupportedMachineError,
    calls_on_oneself,
    compile_filter,
    denied_calls,
)

ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
MISSING = 0x00050000 | errno.ENOSYS
KILL = 0x80000000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
IOCTL = {"x86_64": 16, "aarch64": 29}
SETSOCKOPT = {"x86_64": 54, "aarch64": 208}
MMAP = {"x86_64": 9, "aarch64": 222}
READ = {"x86_64": 0, "aarch64": 63}


def verdict(
    machine: str,
    number: int,
    *arguments: int,
    architecture: int | None = None,
    internet: bool = False,
) -> int:
    """What the kernel's interpreter makes of one call: the few instructions that are used."""
    words = [number, architecture or ARCHITECTURE[machine], 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32]
    program = list(struct.iter_unpack("=HBBI", compile_filter(machine, internet=internet)))
    accumulator = place = 0
    while True:
        code, if_true, if_false, constant = program[place]
        place += 1
        match code:
            case 0x20:
                accumulator = words[constant // 4]
            case 0x54:
                accumulator &= constant
            case 0x15:
                place += if_true if accumulator == constant else if_false
            case 0x35:
                place += if_true if accumulator >= constant else if_false
            case 0x06:
                return int(constant)
            case _:
                raise AssertionError(code)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_is_named_is_refused_and_the_rest_passes(machine: str) -> None:
    for number in denied_calls(machine).values():
        assert verdict(machine, number) == REFUSE
    assert verdict(machine, READ[machine]) == ALLOW
    assert len(set(denied_calls(machine).values())) == len(denied_calls(machine))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls_that_depend_on_their_arguments(machine: str) -> None:
    sigchld = 17
    assert verdict(machine, CLONE[machine], sigchld) == ALLOW
    assert verdict(machine, CLONE[machine], 0x3D0F00) == ALLOW  # a thread
    for namespace in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000):
        assert verdict(machine, CLONE[machine], sigchld | namespace) == REFUSE
    assert verdict(machine, CLONE[machine], 0x40000000 | sigchld) == REFUSE  # NEWNET
    for number in (SOCKET[machine], SOCKETPAIR[machine]):
        assert verdict(machine, number, 1) == ALLOW
        for family in (0, 2, 10, 16, 17, 30, 38, 40):
            assert verdict(machine, number, family) == REFUSE
        for family in (1, 2, 10):
            assert verdict(machine, number, family, internet=True) == ALLOW
        for family in (0, 16, 17, 40):
            assert verdict(machine, number, family, internet=True) == REFUSE
    assert verdict(machine, IOCTL[machine], 0, 0x5413) == ALLOW
    assert verdict(machine, IOCTL[machine], 0, 0x5412) == REFUSE
    # The kernel looks at 32 bits of the request; so must the filter.
    assert verdict(machine, IOCTL[machine], 0, 1 << 32 | 0x5412) == REFUSE


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_memory_that_nothing_counts_is_refused(machine: str) -> None:
    private, shared, validated, anonymous, huge = 2, 1, 3, 0x20, 0x40000

    def mmap(flags: int) -> int:
        return verdict(machine, MMAP[machine], 0, 4096, 3, flags)

    assert mmap(private | anonymous) == mmap(private) == mmap(shared) == ALLOW
    assert mmap(shared | anonymous) == mmap(validated | anonymous) == REFUSE
    assert mmap(shared | anonymous | 1 << 40) == REFUSE
    assert mmap(private | anonymous | huge) == REFUSE
    for option, wanted in ((2, ALLOW), (16, ALLOW), (7, REFUSE), (8, REFUSE), (26, REFUSE)):
        assert verdict(machine, SETSOCKOPT[machine], 3, 1, option) == wanted


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_process_changes_itself_only(machine: str) -> None:
    for number, caller in calls_on_oneself(machine).values():
        arguments = [value for _, value in caller]
        assert verdict(machine, number, *arguments, 7) == ALLOW
        for place, value in caller:
            others = [*arguments[:place], value + 1, *arguments[place + 1 :]]
            assert verdict(machine, number, *others) == REFUSE


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_nobody_thought_of_does_not_exist(machine: str) -> None:
    assert verdict(machine, 435) == MISSING  # clone3, whose flags lie in memory
    assert verdict(machine, 463) == MISSING
    assert verdict(machine, READ[machine], architecture=0x40000003) == KILL  # i386


def test_x32_is_another_way_to_say_the_same_and_is_killed() -> None:
    assert verdict("x86_64", 0x40000000 | 101) == KILL


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(UnsupportedMachineError, match="'riscv64'; there is one for x86_64"):
        compile_filter("riscv64")
