"""Collective groups: the membership of one worker among sending ranks and workers.

Invariant: every wait here watches `StopSignal` and the key "failed" of the group's store. A
member that leaves early sets that key, and the others follow within a second. The backend
detects a member that died (gloo at once), or the timeout that rank 0 put into the store does.
Calls of torch that cannot be interrupted run on a detached thread; only the end of the process
waits for it, since CPython would abort on a thread inside torch.

Ranks: the sending ranks of the policy first, from 0 up, one per pipeline stage, then every
worker of every server. Each sender has a separate backend with all the workers, in which it is
rank 0, so senders never wait for each other.

Keys in the store, a `torch.distributed.TCPStore` that rank 0 serves, below the group's name:
"timeout_s", "here/<rank>", "failed" (the first failed rank and its cause), "at_fault" (the rank
of a worker that caused a failure), and the keys of the backends below "<sender>/".

Traffic is plaintext, and anyone who reaches the store may join; see `docs/protocol.md`.
"""

import atexit
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from treadle.rollout_server.address import Address
from treadle.rollout_server.engine import CollectiveGroup, ElementType, TensorSpec

__all__ = ["GroupMember", "StopSignal", "decode_group", "encode_group", "fail_group"]

_CONNECT_S = 20.0
_POLL_S = 0.001
_CHECK_S = 0.2
_EXIT_S = 5.0
_DIST: Any = dist  # torch has no type annotations for what is used here.

_detached: WeakSet[threading.Thread] = WeakSet()

T = TypeVar("T")


class StopSignal:
    """A request to end an update, with its cause; may be set from any thread."""

    def __init__(self) -> None:
        self.cause = ""
        self._event = threading.Event()

    def set(self, cause: str) -> None:
        """Requests the end; the first cause counts."""
        self.cause = self.cause or cause
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Waits for up to `seconds`; raises RuntimeError if the end is requested."""
        if self._event.wait(seconds):
            raise RuntimeError(self.cause)


class GroupMember:
    """The membership of one worker in a group, from `join` to `leave`.

    Args:
        rank: Rank of this worker in the group.
        device: Device that "nccl" receives on; "gloo" always uses host memory.
    """

    def __init__(self, announced: CollectiveGroup, rank: int, device: torch.device) -> None:
        self.announced = announced
        self.device = torch.device("cpu") if announced.backend == "gloo" else device
        self._rank = rank
        self._backends: dict[int, Any] = {}
        self._store: Any = None
        self._timeout_s = 0.0

    def join(self, stop: StopSignal) -> None:
        """Waits for all members, then connects to each sender.

        Raises:
            RuntimeError: A member did not join in time, left, or could not be reached.
        """
        self._store, self._timeout_s = self._interruptible(
            partial(_find_store, self.announced), stop
        )
        self._store.set(f"here/{self._rank}", b"")
        ranks = range(self.announced.world_size)
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([f"here/{rank}" for rank in ranks]):
            self._check()
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
                self._check,
            )
            self._backends[sender] = self._interruptible(connect, stop)

    def broadcast(self, sender: int, flat: torch.Tensor) -> Any:
        """Starts to receive a broadcast of a sender; returns torch's handle for `wait`."""
        options = _DIST.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = True
        return self._backends[sender].broadcast([flat], options)

    def wait(self, work: Any, stop: StopSignal, failing: str = "a bucket did not come") -> None:
        """Waits until the bytes have arrived.

        Args:
            failing: Message if the deadline passes.

        Raises:
            RuntimeError: The deadline passed, a member failed, or `stop` was set.
        """
        deadline = time.monotonic() + self._timeout_s
        check = time.monotonic() + _CHECK_S
        while not work.is_completed():
            now = time.monotonic()
            if now >= check:
                self._check()
                check = now + _CHECK_S
            if now >= deadline:
                raise RuntimeError(f"{failing} within {self._timeout_s:g} s")
            stop.wait(_POLL_S)
        work.wait()

    def written(self, stop: StopSignal) -> None:
        """Confirms to the senders that this worker has written everything.

        Uses the backends, so that all senders notice a worker that died before.

        Raises:
            RuntimeError: As `wait` does.
        """
        options = _DIST.GatherOptions()
        options.rootRank, options.asyncOp = 0, True
        answer = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for backend in self._backends.values():
            self.wait(backend.gather([], [answer], options), stop, "a sender did not end")

    def failure(self) -> str:
        """Returns the first recorded cause of the group's end; "" if there is none.

        Raises:
            RuntimeError: The store is gone.
        """
        if self._store is None or not self._store.check(["failed"]):
            return ""
        cause: str = self._store.get("failed").decode()
        return cause

    def fail(self, cause: str, *, at_fault: bool) -> None:
        """Ends the group for every member; does nothing if it has ended or the store is gone.

        Args:
            cause: Cause, for the other members' error messages.
            at_fault: Whether this worker caused the failure, and not another member.
        """
        if self._store is None:  # Not connected yet; connecting could block for long.
            _run_detached(partial(_fail_from_outside, self.announced, self._rank, cause))
            return
        with suppress(RuntimeError):
            _fail(self._store, self._rank, cause, at_fault=at_fault)

    def leave(self) -> None:
        """Leaves the group. A detached thread waits for operations that are still pending."""
        backends, self._backends = self._backends, {}
        _run_detached(partial(_abort_backends, backends))

    def _interruptible(self, function: Callable[[], T], stop: StopSignal) -> T:
        """Returns the result of a blocking function; the wait for it can be interrupted."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        _run_detached(run)
        while not future.done():
            stop.wait(20 * _POLL_S)
            self._check()
        return future.result()

    def _check(self) -> None:
        if cause := self.failure():
            raise RuntimeError(cause)


def fail_group(announced: CollectiveGroup, cause: str) -> None:
    """Ends a group for all its members, from a process that is not a member.

    For engines whose workers process no messages while they receive. A group without its store
    has ended already, so this never fails. Blocks for at most 20 s.
    """
    _fail_from_outside(announced, announced.first_rank, cause)


def encode_group(group: CollectiveGroup, specs: Iterable[TensorSpec]) -> str:
    """Encodes a group and the tensors that its senders send, for workers in other processes."""
    tensors = [[spec.name, spec.element_type.value, spec.shape] for spec in specs]
    return json.dumps([asdict(group), tensors])


def decode_group(message: str) -> tuple[CollectiveGroup, tuple[TensorSpec, ...]]:
    """Decodes a message of `encode_group`, in the worker."""
    group, tensors = json.loads(message)
    specs = tuple(
        TensorSpec(name=name, element_type=ElementType(element_type), shape=tuple(shape))
        for name, element_type, shape in tensors
    )
    return CollectiveGroup(**{**group, "senders": tuple(group["senders"])}), specs


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
    store.compare_set("failed", "", f"rank {rank}: {cause}")  # Unless a cause is recorded already.


def _backend(
    announced: CollectiveGroup,
    sender: int,
    rank: int,
    size: int,
    timeout: timedelta,
    check: Callable[[], None],
) -> Any:
    # A separate connection: a store serves one call at a time, and NCCL may wait long.
    store = _DIST.PrefixStore(str(sender), _open_store(announced))
    if announced.backend == "nccl":
        if not dist.is_nccl_available():
            raise RuntimeError("this torch is built without NCCL: use the gloo backend")
        options = _DIST.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # Ours must come first: its watchdog kills the process.
        return _DIST.ProcessGroupNCCL(store, rank, size, options)
    options = _DIST.ProcessGroupGloo._Options()
    options._timeout = timeout
    # Listen only on the interface that reaches rank 0: on loopback if rank 0 is there.
    own = _own_address(*Address.parse(announced.rendezvous))
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=own)]
    return _DIST.ProcessGroupGloo(_WatchedStore(store, check), rank, size, options)


class _WatchedStore(_DIST.Store):  # type: ignore[misc]
    """A store for gloo whose waits end when the group ends.

    Args:
        check: Raises if the group has ended.
    """

    def __init__(self, store: Any, check: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._check = check

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)  # Gloo has waited for it.
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            self._check()
            if time.monotonic() >= deadline:
                raise RuntimeError(f"a member did not connect within {timeout}")
            time.sleep(20 * _POLL_S)


def _run_detached(function: Callable[[], None]) -> None:
    """Runs a function on a thread that only the end of the process waits for."""
    thread = threading.Thread(target=function, daemon=True)
    _detached.add(thread)
    thread.start()


@atexit.register
def _wait_for_those_detached() -> None:
    deadline = time.monotonic() + _EXIT_S
    for thread in tuple(_detached):
        thread.join(max(0.0, deadline - time.monotonic()))


def _abort_backends(backends: dict[int, Any]) -> None:
    for backend in backends.values():
        with suppress(RuntimeError):
            backend.abort()
    backends.clear()  # Drops the last references, which waits for what gloo cannot abort.


def _own_address(host: str, port: int) -> str:
    """Returns the local address that routes to `host`; sends no packet."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
