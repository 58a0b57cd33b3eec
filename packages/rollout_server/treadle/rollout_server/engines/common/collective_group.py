"""The group: what one worker holds of its place among sending ranks and workers.

Invariant: nothing here waits without an eye on `Stop` and on the key "failed" of the group's
store. Whoever leaves in the middle sets that key, so that the others follow within a second;
who dies is noticed by the backend (gloo, at once), or by the timeout that rank 0 left in the
store. What torch cannot interrupt, a thread waits for, and is left alone when nobody needs it;
only the end of the process waits for it, since CPython would abort on a thread inside torch.

Ranks: the sending ranks of the policy, 0 and up, one per pipeline stage, and then every worker
of every server. Each sender has a backend of its own with all the workers, in which it is rank
0, so that no sender waits for another one.

In the store, a `torch.distributed.TCPStore` that rank 0 serves, below the group's name:
"timeout_s", "here/<rank>", "failed" (by whom and why), "at_fault" (the rank of a worker that failed
by itself), and the backends' own keys below "<sender>/".

This is plaintext, and whoever reaches it may join; see `docs/protocol.md`.
"""

import atexit
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from treadle.rollout_server.address import Address
from treadle.rollout_server.engine import CollectiveGroup

__all__ = ["Membership", "Stop", "fail_group"]

_CONNECT_S = 20.0
_POLL_S = 0.001
_LOOK_S = 0.2
_EXIT_S = 5.0
_DIST: Any = dist  # torch does not declare what is used of it.

_left_alone: WeakSet[threading.Thread] = WeakSet()

T = TypeVar("T")


class Stop:
    """A wish to end an update, and why; made in any thread."""

    def __init__(self) -> None:
        self.cause = ""
        self._event = threading.Event()

    def set(self, cause: str) -> None:
        """Makes the wish; the first one counts."""
        self.cause = self.cause or cause
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Raises RuntimeError when the wish is made within so many seconds."""
        if self._event.wait(seconds):
            raise RuntimeError(self.cause)


class Membership:
    """One worker's place in a group, from `join` to `leave`.

    Args:
        announced: The group.
        rank: This worker's.
        device: Where "nccl" puts the bytes; "gloo" takes host memory.
    """

    def __init__(self, announced: CollectiveGroup, rank: int, device: torch.device) -> None:
        self.announced = announced
        self.device = torch.device("cpu") if announced.backend == "gloo" else device
        self._rank = rank
        self._backends: dict[int, Any] = {}
        self._store: Any = None
        self._timeout_s = 0.0

    def join(self, stop: Stop) -> None:
        """Waits for all members, then connects with each sender.

        Raises:
            RuntimeError: Some did not come, or left, or could not be connected with.
        """
        self._store, self._timeout_s = self._patiently(partial(_find_store, self.announced), stop)
        self._store.set(f"here/{self._rank}", b"")
        ranks = range(self.announced.world_size)
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([f"here/{rank}" for rank in ranks]):
            self._look()
            if time.monotonic() >= deadline:
                missing = [str(rank) for rank in ranks if not self._store.check([f"here/{rank}"])]
                raise RuntimeError(
                    f"rank {', '.join(missing)} did not come within {self._timeout_s:g} s"
                )
            stop.wait(20 * _POLL_S)
        num_senders = max(self.announced.senders) + 1
        for sender in range(num_senders):
            connect = partial(
                _backend,
                self.announced,
                sender,
                1 + self._rank - num_senders,
                1 + self.announced.world_size - num_senders,
                timedelta(seconds=self._timeout_s),
                self._look,
            )
            self._backends[sender] = self._patiently(connect, stop)

    def broadcast(self, sender: int, flat: torch.Tensor) -> Any:
        """Takes what a rank sends; returns torch's handle, for `wait`."""
        options = _DIST.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = True
        return self._backends[sender].broadcast([flat], options)

    def wait(self, work: Any, stop: Stop, failing: str = "a bucket did not come") -> None:
        """Returns when the bytes are there.

        Args:
            work: Of the backend.
            stop: Ends the wait.
            failing: What to say if it is not done in time.

        Raises:
            RuntimeError: They did not come in time, a member failed, or the wish to stop came.
        """
        deadline = time.monotonic() + self._timeout_s
        look = time.monotonic() + _LOOK_S
        while not work.is_completed():
            now = time.monotonic()
            if now >= look:
                self._look()
                look = now + _LOOK_S
            if now >= deadline:
                raise RuntimeError(f"{failing} within {self._timeout_s:g} s")
            stop.wait(_POLL_S)
        work.wait()

    def written(self, stop: Stop) -> None:
        """Tells the senders that this worker has written everything, when they ask.

        Through the backends, so that who dies before is noticed by all senders.

        Raises:
            RuntimeError: As `wait`.
        """
        options = _DIST.GatherOptions()
        options.rootRank, options.asyncOp = 0, True
        answer = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for backend in self._backends.values():
            self.wait(backend.gather([], [answer], options), stop, "a sender did not end")

    def failure(self) -> str:
        """Why the group ended, by who said it first; empty: nobody has.

        Raises:
            RuntimeError: The store is gone.
        """
        if self._store is None or not self._store.check(["failed"]):
            return ""
        cause: str = self._store.get("failed").decode()
        return cause

    def fail(self, cause: str, *, at_fault: bool) -> None:
        """Has every member leave, unless one did before; nothing where the store is gone.

        Args:
            cause: For their messages.
            at_fault: Whether it is this worker's own, and not another member's.
        """
        if self._store is None:  # Not found yet, which may take longer than anyone should wait.
            _leave_alone(partial(_fail_from_outside, self.announced, self._rank, cause))
            return
        with suppress(RuntimeError):
            _fail(self._store, self._rank, cause, at_fault=at_fault)

    def leave(self) -> None:
        """Lets go. What a backend still waits for is left to a thread, which ends with it."""
        backends, self._backends = self._backends, {}
        _leave_alone(partial(_let_go, backends))

    def _patiently(self, function: Callable[[], T], stop: Stop) -> T:
        """What a function returns that ends by a timeout of its own, if at all."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        _leave_alone(run)
        while not future.done():
            stop.wait(20 * _POLL_S)
            self._look()
        return future.result()

    def _look(self) -> None:
        if cause := self.failure():
            raise RuntimeError(cause)


def fail_group(announced: CollectiveGroup, cause: str) -> None:
    """Ends a group for all its members, from a process that is none of them.

    For engines whose workers hear nothing while they receive. Without its store a group has
    ended anyway, so this never fails. Blocks for at most 20 s.
    """
    _fail_from_outside(announced, announced.first_rank, cause)


def _find_store(announced: CollectiveGroup) -> tuple[Any, float]:
    store = _open_store(announced)
    return store, float(store.get("timeout_s"))


def _open_store(announced: CollectiveGroup) -> Any:
    host, port = Address.parse(announced.rendezvous)
    timeout = timedelta(seconds=_CONNECT_S)
    store = _DIST.TCPStore(host, port, wait_for_workers=False, timeout=timeout)
    return _DIST.PrefixStore(announced.group_name, store)


def _fail_from_outside(announced: CollectiveGroup, rank: int, cause: str) -> None:
    with suppress(RuntimeError):
        _fail(_open_store(announced), rank, cause, at_fault=True)


def _fail(store: Any, rank: int, cause: str, *, at_fault: bool) -> None:
    if at_fault:
        store.set("at_fault", str(rank))
    store.compare_set("failed", "", f"rank {rank}: {cause}")  # If nobody said why before.


def _backend(
    announced: CollectiveGroup,
    sender: int,
    rank: int,
    size: int,
    timeout: timedelta,
    look: Callable[[], None],
) -> Any:
    # With a connection of its own: a store serves one call at a time, and NCCL may wait long.
    store = _DIST.PrefixStore(str(sender), _open_store(announced))
    if announced.backend == "nccl":
        if not dist.is_nccl_available():
            raise RuntimeError("this torch was built without NCCL: use the gloo backend")
        options = _DIST.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # Its watchdog ends the process; ours is to come first.
        return _DIST.ProcessGroupNCCL(store, rank, size, options)
    options = _DIST.ProcessGroupGloo._Options()
    options._timeout = timeout
    # Listens only where it can be reached from rank 0: on loopback, if that is there.
    own = _own_address(*Address.parse(announced.rendezvous))
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=own)]
    return _DIST.ProcessGroupGloo(_WatchedStore(store, look), rank, size, options)


class _WatchedStore(_DIST.Store):  # type: ignore[misc]
    """A store as gloo uses it, whose waits end when the group does.

    Args:
        store: Has the keys.
        look: Raises if the group has ended.
    """

    def __init__(self, store: Any, look: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._look = look

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)  # Gloo has waited for it.
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            self._look()
            if time.monotonic() >= deadline:
                raise RuntimeError(f"a member did not connect within {timeout}")
            time.sleep(20 * _POLL_S)


def _leave_alone(function: Callable[[], None]) -> None:
    """Runs it in a thread that nobody waits for but the end of the process."""
    thread = threading.Thread(target=function, daemon=True)
    _left_alone.add(thread)
    thread.start()


@atexit.register
def _wait_for_those_left_alone() -> None:
    deadline = time.monotonic() + _EXIT_S
    for thread in tuple(_left_alone):
        thread.join(max(0.0, deadline - time.monotonic()))


def _let_go(backends: dict[int, Any]) -> None:
    for backend in backends.values():
        with suppress(RuntimeError):
            backend.abort()
    backends.clear()  # The last references: it waits for what gloo cannot abort.


def _own_address(host: str, port: int) -> str:
    """The address of this machine that packets to `host` leave from; none is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
