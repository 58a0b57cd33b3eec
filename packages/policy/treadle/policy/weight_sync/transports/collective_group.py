"""A collective group, as one sending rank sees it.

Ranks: first the senders, by their rank in the policy, then every worker of every server. Each
sender has its own backend with all the workers, in which it is rank 0, so that a sender never waits
for another sender. Rank 0 serves the store; `docs/protocol.md` lists its keys. The store outlives
its groups, whose names are prefixes in it. `collective.py` makes and ends the groups.

Invariant: every wait watches the key "failed" of the group's store. A member that leaves early sets
that key, so that the others follow within a second. A member that dies is noticed by the backend
(gloo, at once) or by the timeout. A wait that torch cannot interrupt happens in a detached thread,
which only the end of the process waits for, because CPython would abort on a thread inside torch.
"""

import atexit
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

__all__ = ["CollectiveGroup", "GroupLost", "Membership", "RankStore"]

_POLL_S = 0.001
_CHECK_S = 0.2
_EXIT_S = 5.0
_DIST: Any = dist  # torch does not declare what is used of it

_detached: WeakSet[threading.Thread] = WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """The settings that all senders of a group share.

    Attributes:
        name: Never used before in its store.
        rendezvous: `host:port` of rank 0's store.
        world_size: Number of senders and workers.
        timeout_s: Maximum wait for a member to join, and for one broadcast.
    """

    name: str
    backend: str
    rendezvous: str
    world_size: int
    num_senders: int
    timeout_s: float


class GroupLost(Exception):
    """The group cannot continue; the message names the cause."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class RankStore:
    """The store that rank 0 serves, at a free port of one address only."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self.store = _DIST.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),  # the store owns it from here on
        )
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def announce(self, name: str, timeout_s: float) -> None:
        """Stores the group's timeout for its workers, before the update names the group."""
        _DIST.PrefixStore(name, self.store).set("timeout_s", str(timeout_s))


class Membership:
    """One sender's membership in a group, from `join` to `leave`.

    Args:
        device: Where "nccl" reads the bytes; "gloo" reads them from host memory.
        store: The store, if this process serves it.

    Raises:
        GroupLost: The store cannot be reached.
    """

    def __init__(
        self, group: CollectiveGroup, rank: int, *, device: torch.device, store: RankStore | None
    ) -> None:
        self.group = group
        self.device = torch.device("cpu") if group.backend == "gloo" else device
        self._rank = rank
        self._backends: list[Any] = []
        host, port = _address(group.rendezvous)
        timeout = timedelta(seconds=group.timeout_s)
        try:
            served = store.store if store is not None else _connect(host, port, timeout)
        except RuntimeError as error:
            raise GroupLost(f"cannot reach the store at {group.rendezvous}: {error}") from error
        self._store = _DIST.PrefixStore(group.name, served)

    def join(self) -> None:
        """Waits for all members, then connects to the workers.

        Raises:
            GroupLost: A member did not join, left, or could not be reached.
        """
        ranks = range(self.group.world_size)
        keys = [f"here/{rank}" for rank in ranks]
        deadline = time.monotonic() + self.group.timeout_s
        try:
            self._store.set(keys[self._rank], b"")
            while not self._store.check(keys):
                self._raise_if_failed()
                if time.monotonic() >= deadline:
                    missing = tuple(rank for rank in ranks if not self._store.check([keys[rank]]))
                    waited = f"{self.group.timeout_s:g} s"
                    raise GroupLost(f"ranks {missing} did not join within {waited}", missing)
                time.sleep(20 * _POLL_S)
            self._backends.append(self._connected())
        except RuntimeError as error:
            raise GroupLost(str(error)) from error

    def broadcast(self, flat: torch.Tensor) -> Any:
        """Starts to send `flat` to all workers; returns torch's handle, for `wait`.

        Raises:
            GroupLost: The backend is broken.
        """
        options = _DIST.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = True
        try:
            return self._backends[0].broadcast([flat], options)
        except RuntimeError as error:
            raise GroupLost(str(error)) from error

    def wait(self, work: Any, failing: str = "the workers did not receive a bucket") -> None:
        """Waits until the memory of a broadcast may be written again.

        Raises:
            GroupLost: It took too long, or a member failed.
        """
        self._until(work.is_completed, failing)
        try:
            work.wait()
        except RuntimeError as error:
            raise GroupLost(str(error)) from error

    def wait_written(self) -> None:
        """Waits until all workers have confirmed that they have written everything.

        They confirm through the backend, which notices a worker that dies instead.

        Raises:
            GroupLost: It took too long, or a member failed.
        """
        options = _DIST.GatherOptions()
        options.rootRank, options.asyncOp = 0, True
        members = 1 + self.group.world_size - self.group.num_senders
        answers = list(torch.zeros(1 + members, 1, dtype=torch.uint8, device=self.device))
        own = answers.pop()
        try:
            work = self._backends[0].gather([answers], [own], options)
        except RuntimeError as error:
            raise GroupLost(str(error)) from error
        self.wait(work, "the workers did not write the weights")

    def failure(self) -> str:
        """Returns the first reported cause of the end; empty if none, or if the store is gone."""
        with suppress(RuntimeError):
            if self._store.check(["failed"]):
                cause: str = self._store.get("failed").decode()
                return cause
        return ""

    def at_fault(self) -> tuple[int, ...]:
        """Returns the rank that reported its own failure, as opposed to another one's, if any."""
        with suppress(RuntimeError):
            if self._store.check(["at_fault"]):
                return (int(self._store.get("at_fault")),)
        return ()

    def fail(self, cause: str) -> None:
        """Makes every member leave, unless one left before; does nothing if the store is gone."""
        with suppress(RuntimeError):
            self._store.compare_set("failed", "", f"rank {self._rank}: {cause}")

    def leave(self) -> None:
        """Leaves the group. A detached thread waits for what the backend has not finished."""
        backends, self._backends = self._backends, []
        _detach(partial(_abort_backends, backends))

    def _until(self, done: Callable[[], bool], what: str, *, poll_s: float = _POLL_S) -> None:
        deadline = time.monotonic() + self.group.timeout_s
        next_check = time.monotonic() + _CHECK_S
        try:
            while not done():
                now = time.monotonic()
                if now >= next_check:
                    self._raise_if_failed()
                    next_check = now + _CHECK_S
                if now >= deadline:
                    raise GroupLost(f"{what} within {self.group.timeout_s:g} s")
                time.sleep(poll_s)
        except RuntimeError as error:
            raise GroupLost(str(error)) from error

    def _raise_if_failed(self) -> None:
        if cause := self.failure():
            raise GroupLost(cause)

    def _connected(self) -> Any:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self._connect())
            except BaseException as error:
                future.set_exception(error)

        _detach(run)
        self._until(future.done, "no connection to the workers", poll_s=20 * _POLL_S)
        return future.result()

    def _connect(self) -> Any:
        size = 1 + self.group.world_size - self.group.num_senders
        timeout = timedelta(seconds=self.group.timeout_s)
        # A separate connection: a store serves one call at a time, and NCCL may wait long in one.
        own = _connect(*_address(self.group.rendezvous), timeout)
        store = _DIST.PrefixStore(f"{self.group.name}/{self._rank}", own)
        if self.group.backend == "nccl":
            if not dist.is_nccl_available():
                raise GroupLost(
                    "the trainer's torch was built without NCCL: set sync.transport.backend=gloo"
                )
            options = _DIST.ProcessGroupNCCL.Options()
            options._timeout = (
                2 * timeout
            )  # its watchdog ends the process, so our own timeout must come first
            return _DIST.ProcessGroupNCCL(store, 0, size, options)
        options = _DIST.ProcessGroupGloo._Options()
        options._timeout = timeout
        # Listen only at the address at which rank 0 can reach this process, which may be loopback.
        own = _own_address(*_address(self.group.rendezvous))
        options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=own)]
        return _DIST.ProcessGroupGloo(_WatchedStore(store, self._raise_if_failed), 0, size, options)


class _WatchedStore(_DIST.Store):  # type: ignore[misc]
    """A store for gloo whose waits end when the group does."""

    def __init__(self, store: Any, check: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._check = check

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)  # gloo has waited for it
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            self._check()
            if time.monotonic() >= deadline:
                raise RuntimeError(f"a member did not connect within {timeout}")
            time.sleep(20 * _POLL_S)


def _detach(function: Callable[[], None]) -> None:
    """Runs the function in a thread that only the end of the process waits for."""
    thread = threading.Thread(target=function, daemon=True)
    _detached.add(thread)
    thread.start()


@atexit.register
def _join_detached() -> None:
    deadline = time.monotonic() + _EXIT_S
    for thread in tuple(_detached):
        thread.join(max(0.0, deadline - time.monotonic()))


def _connect(host: str, port: int, timeout: timedelta) -> Any:
    return _DIST.TCPStore(host, port, wait_for_workers=False, timeout=timeout)


def _abort_backends(backends: list[Any]) -> None:
    for backend in backends:
        with suppress(RuntimeError):
            backend.abort()
    backends.clear()  # drops the last references, which waits for what gloo cannot abort


def _address(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    return host.strip("[]"), int(port)


def _own_address(host: str, port: int) -> str:
    """Returns this machine's address on the route to `host`. No packet is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
