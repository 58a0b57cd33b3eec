"""Removes what an engine leaves in /dev/shm, from a process that outlives the server.

Invariant: a file is removed only if a process below the server was seen to hold it for writing, it
belongs to this user, and no living process holds it any more. Names do not identify the owner:
several runs share a host, and engines choose names at random. So each name that appears is compared
at once with the memory maps and descriptors of the server's processes, by inode: the C library
creates a semaphore under another name than its final one. Files that the last processes create
within the 50 ms before a SIGKILL may stay.

Who waits: this process, for new names in /dev/shm and for the end of the server; then for the end
of the server's other processes, at most `_ORPHANS_S`. It needs a kernel with pidfd (5.3).

It runs as a script, so it imports the standard library only.
"""

import contextlib
import ctypes
import functools
import os
import select
import stat
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_DIRECTORY = Path("/dev/shm")
# A name appears before its creator holds it. A look reads all of /proc, so later ones are rarer.
_LOOK_S, _LAST_LOOK_S = 0.02, 0.2
_LOOKED_FOR_S = 2.0
_ORPHANS_S = 60.0
_IN_CREATE, _IN_MOVED_TO, _IN_DELETE, _IN_MOVED_FROM = 0x100, 0x80, 0x200, 0x40
_CAME, _WENT = _IN_CREATE | _IN_MOVED_TO, _IN_DELETE | _IN_MOVED_FROM
_EVENT = struct.Struct("iIII")

_Inode = tuple[int, int]


@functools.cache
def start() -> subprocess.Popen[bytes]:
    """Starts the cleaner of this process and its children; a second call returns the first's."""
    from treadle.tracing.child_process import ENDS_BY_ITSELF  # this file also runs as a script

    return subprocess.Popen(
        (sys.executable, "-I", "-S", __file__, str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # What ends the server must not end it.
        env={**os.environ, **ENDS_BY_ITSELF},
        start_new_session=True,
    )


class Cleaner:
    """The names in a directory that belong to one server.

    Raises:
        OSError: The server has ended, or this kernel has no pidfd or no inotify.
    """

    def __init__(self, server: int, directory: Path = _DIRECTORY) -> None:
        self._directory = directory
        self._processes = {server: os.pidfd_open(server)}
        self._server = self._processes[server]
        self._ours: dict[str, int] = {}  # Each pins its inode, so that no other gets its number.
        self._events = _watch(directory)
        # The server did not wait for this process to begin.
        self._new = dict.fromkeys(os.listdir(directory), time.monotonic() + _LOOKED_FOR_S)

    def run(self) -> None:
        """Watches until the server and its processes have ended; then removes what they left."""
        poller = select.poll()
        poller.register(self._events, select.POLLIN)
        poller.register(self._server, select.POLLIN)
        ended, pause_s = False, _LOOK_S
        while not ended:
            ready = poller.poll(pause_s * 1000 if self._new else None)
            ended = any(descriptor == self._server for descriptor, _ in ready)
            pause_s = _LOOK_S if ready else min(2 * pause_s, _LAST_LOOK_S)
            self._look()
        deadline = time.monotonic() + _ORPHANS_S
        while self._alive() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            self._look()
        self._remove()

    def _look(self) -> None:
        """Reads what appeared and went, and finds which of it is the server's."""
        now = time.monotonic()
        for mask, name in _read(self._events):
            if mask & _WENT:
                self._new.pop(name, None)
                if name in self._ours:
                    os.close(self._ours.pop(name))
            elif mask & _CAME:
                self._new[name] = now + _LOOKED_FOR_S
        files = {name: inode for name in self._new if (inode := self._inode_of(name))}
        # The others went, or are no files of this user.
        self._new = {name: self._new[name] for name in files}
        if not files:
            return
        inodes = {inode: name for name, inode in files.items()}
        self._find_processes()
        held: set[_Inode] = set()
        for pid in self._processes:
            held |= _held(pid, inodes, writing=True)
        for name in list(self._new):
            if self._inode_of(name) in held:
                with contextlib.suppress(OSError):  # It went; an event says so.
                    self._ours[name] = os.open(self._directory / name, os.O_PATH | os.O_NOFOLLOW)
                    del self._new[name]
        self._new = {name: until for name, until in self._new.items() if until > now}

    def _inode_of(self, name: str) -> _Inode | None:
        """Returns which file of this user has the name."""
        try:
            about = (self._directory / name).lstat()
        except OSError:
            return None
        mine = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
        return _inode(about) if mine else None

    def _find_processes(self) -> None:
        """Adds new descendants; one whose parent ended first was found before, or never."""
        children: dict[int, list[int]] = defaultdict(list)
        for about in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = int(about.read_text(errors="replace").rpartition(")")[2].split()[1])
                children[parent].append(int(about.parent.name))
        left = list(self._processes)
        while left:
            for child in children[left.pop()]:
                if child not in self._processes and child != os.getpid():
                    with contextlib.suppress(OSError):
                        self._processes[child] = os.pidfd_open(child)
                        left.append(child)

    def _alive(self) -> bool:
        """Returns whether one of the processes has not ended, and forgets those that have."""
        poller = select.poll()
        for descriptor in self._processes.values():
            poller.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poller.poll(0)}
        for pid, descriptor in list(self._processes.items()):
            if descriptor in ended:
                os.close(self._processes.pop(pid))
        return bool(self._processes)

    def _remove(self) -> None:
        ours = {name: _inode(os.fstat(descriptor)) for name, descriptor in self._ours.items()}
        names = {inode: name for name, inode in ours.items()}
        held: set[_Inode] = set()
        if ours:
            for directory in Path("/proc").glob("[0-9]*"):
                held |= _held(int(directory.name), names, writing=False)
        for name, inode in ours.items():
            if inode not in held and self._inode_of(name) == inode:
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()


def _inode(about: os.stat_result) -> _Inode:
    return about.st_dev, about.st_ino


def _held(pid: int, names: dict[_Inode, str], *, writing: bool) -> set[_Inode]:
    """Returns which of the inodes a process has mapped or open."""
    found: set[_Inode] = set()
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            _, access, _, device, number, *_ = line.split(maxsplit=5)
            if access[3] == "s" and (access[1] == "w" or not writing):
                major, _, minor = device.partition(":")
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(number)))
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError, StopIteration):
                # By its name first: `stat` may wait for another machine.
                name = Path(os.readlink(entry)).name.removesuffix(" (deleted)")
                if name in names.values() and _opened(pid, entry.name, writing=writing):
                    found.add(_inode(entry.stat()))
    return found & set(names)


def _opened(pid: int, descriptor: str, *, writing: bool) -> bool:
    """Returns whether a descriptor can be written, or at least read: `O_PATH` can be neither."""
    about = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
    flags = int(
        next(line.split()[1] for line in about.splitlines() if line.startswith("flags:")), 8
    )
    if writing:
        return bool(flags & os.O_ACCMODE) and not flags & os.O_PATH
    return not flags & os.O_PATH


def _watch(directory: Path) -> int:
    """Returns a descriptor from which changes of the directory are read."""
    library = ctypes.CDLL(None, use_errno=True)
    events: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if events < 0 or library.inotify_add_watch(events, bytes(directory), _CAME | _WENT) < 0:
        raise OSError(ctypes.get_errno(), f"cannot watch {directory}")
    return events


def _read(events: int) -> Iterator[tuple[int, str]]:
    """Yields what happened and to which name."""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(events, 1 << 16):
            while data:
                _, mask, _, length = _EVENT.unpack_from(data)
                name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
                data = data[_EVENT.size + length :]
                yield mask, os.fsdecode(name)


if __name__ == "__main__":
    Cleaner(int(sys.argv[1])).run()
