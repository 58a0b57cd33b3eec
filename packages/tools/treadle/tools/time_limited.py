"""A function with a time limit: it runs in a separate process, which is killed when it is slow.

Only a process can be stopped in the middle of a computation, and tools and rewards compute on what
a model wrote: simplifying its formula may never end.

Invariant: a call has exactly one outcome: the function's result, its error, or `TimeoutError`. A
process that was killed or died is replaced at the next call. The limit starts when a process takes
the call. A caller that is cancelled frees its process at once.

The caller awaits a thread of this object's own pool, one per process; the thread waits for its
process, at most the limit. A process ends with this one, whatever ends it.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from treadle.agent_loop import user_place

A = TypeVar("A")
R = TypeVar("R")

_START_S = 120.0
"""For a process to start and to import what the function needs; not part of the limit."""


class TimeLimitedError(Exception):
    """The function raised or could not be made, or its process died; the message says which."""


class TimeLimited(Generic[A, R]):
    """A function of one argument, with a time limit.

    Args:
        make: Makes the function, in the process; picklable. The function may be async; argument
            and result are picklable.
        name: Prefix of the thread names.
        timeout_s: Maximum time of a call in seconds.
        processes: Maximum number of calls at the same time.

    Raises:
        ValueError: `timeout_s` is not above 0.
    """

    def __init__(
        self,
        make: Callable[[], Callable[[A], object]],
        *,
        name: str,
        timeout_s: float,
        processes: int,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
        self._make = make
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix=name)
        self._own = threading.local()

    async def __call__(self, argument: A) -> R:
        """Calls the function.

        Raises:
            TimeoutError: It took too long.
            TimeLimitedError: It could not be made, it raised, its process died, or the argument or
                the result cannot be pickled.
        """
        caller = _Caller()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._call, argument, caller)
        except asyncio.CancelledError:
            caller.leave()
            raise

    def _call(self, argument: A, caller: _Caller) -> R:
        """In a thread of the pool, which keeps its process from call to call."""
        process: _Process | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = _Process(self._make)
        try:
            with caller.waits_for(process):
                done, answer = process.ask(argument, self._timeout_s)
        except TimeoutError:
            self._own.process = None
            process.kill()
            raise
        except (EOFError, OSError) as error:
            self._own.process = None
            raise TimeLimitedError(f"its process died with exit code {process.kill()}") from error
        if not done:
            raise TimeLimitedError(answer)
        return answer  # type: ignore[return-value]  # what the function of type A -> R returned


class _Caller:
    """One caller, which may be cancelled: then the process that it waits for is killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = False
        self._process: _Process | None = None

    def leave(self) -> None:
        """In the event loop: interrupts the call, or lets it not begin."""
        with self._lock:
            self._left = True
            if self._process is not None:
                self._process.interrupt()

    @contextmanager
    def waits_for(self, process: _Process) -> Iterator[None]:
        """In the thread, around the call.

        Raises:
            TimeLimitedError: The caller left before.
        """
        with self._lock:
            if self._left:
                raise TimeLimitedError("its caller was cancelled")
            self._process = process
        try:
            yield
        finally:
            with self._lock:
                self._process = None


class _Process:
    """One process, which answers one call at a time.

    Raises:
        TimeLimitedError: The function could not be made in it.
    """

    def __init__(self, make: Callable[[], Callable[[A], object]]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()
        try:
            made, reason = self._receive(_START_S)
        except TimeoutError:
            self.kill()
            raise TimeLimitedError(f"its process did not start within {_START_S:g} s") from None
        except (EOFError, OSError) as error:
            raise TimeLimitedError(f"its process died with exit code {self.kill()}") from error
        if not made:
            self.kill()
            raise TimeLimitedError(f"it cannot be made: {reason}")

    def ask(self, argument: object, timeout_s: float) -> tuple[bool, object]:
        """Returns whether the function returned, and what; or the text of its error."""
        try:
            packed = pickle.dumps(argument)
        except Exception as error:  # a border: pickle raises whatever the argument's classes do
            raise TimeLimitedError(f"its argument cannot be pickled: {_text(error)}") from error
        self._connection.send_bytes(packed)
        return self._receive(timeout_s)

    def interrupt(self) -> None:
        """Kills the process while a caller waits for it."""
        self._process.kill()

    def kill(self) -> int | None:
        """Ends the process; returns its exit code."""
        self._process.kill()
        self._process.join()
        exit_code = self._process.exitcode
        self._connection.close()
        self._process.close()
        return exit_code

    def _receive(self, timeout_s: float) -> tuple[bool, object]:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        packed = self._connection.recv_bytes()
        try:
            done, answer = pickle.loads(packed)
        except Exception as error:  # a border, as in `ask`
            raise TimeLimitedError(f"its result cannot be unpickled: {_text(error)}") from error
        return done, answer


def _serve(connection: Connection, make: Callable[[], Callable[[object], object]]) -> None:
    """The process: answers what comes until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the other end decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        function = make()
    except Exception as error:  # a border, as below
        connection.send((False, _text(error)))
        return
    connection.send((True, None))
    while True:
        try:
            packed = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(function, packed))


def _answer(function: Callable[[object], object], packed: bytes) -> bytes:
    try:
        result = function(pickle.loads(packed))
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return pickle.dumps((True, result))
    except Exception as error:  # a border: whatever the function raises is an answer
        return pickle.dumps((False, _text(error)))


def _end_with_parent() -> None:
    """Ends the process with its parent, even during a computation that never ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a child process"
    wait([parent.sentinel])
    os._exit(1)


def _text(error: Exception) -> str:
    place = user_place(error)  # the traceback stays in this process
    return f"{type(error).__name__}: {error}" + ("" if place is None else f" ({place})")
