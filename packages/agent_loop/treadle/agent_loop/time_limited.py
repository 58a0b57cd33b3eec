"""A user's function in a process of its own, which is killed when the function is slow.

Only a process can be stopped in the middle of a computation, and tools and rewards compute on what
a model wrote: a regular expression may backtrack for ever, and holds the interpreter's lock then.

Invariant: a call has exactly one outcome: the function's result, its error, or `TimeoutError`. A
process that was killed or died is replaced at the next call. The limit starts when a process takes
the call. A caller that is cancelled frees its process at once. What is killed is named by the file
and line that it executed: the process writes them in a signal handler that needs no lock.

The caller awaits a thread of this object's own pool; the thread waits for its process, at most the
limit. A process serves one call at a time; it keeps the globals of the function's module from call
to call, and no other process sees them. All end with this one, whatever ends it; those that are
idle end with the run that called them (`end_idle_processes`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import logging
import math
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from treadle.agent_loop.user_code import RemoteError, dumped_place, user_frame, user_place
from treadle.tracing.child_process import child_python_path, end_now, supervised

A = TypeVar("A")
R = TypeVar("R")

_START_S = 120.0
"""For a process to start and to import what the function needs; not part of the limit."""
_ANOTHER_S = 0.5
"""For which a call waits until a process is free, before it starts another one."""
_PLACE_S, _PIECE_S = 2.0, 0.05
_NOTEWORTHY_S = 1.0
"""How long a call lasted that is worth a warning when its caller leaves."""
_PROGRAM = "import sys; from treadle.agent_loop.time_limited import serve; serve(*sys.argv[1:])"

_log = logging.getLogger(__name__)


class TimeLimitedError(Exception):
    """The function or its creation raised, or its process died; the message gives the cause."""


class TimeLimited(Generic[A, R]):
    """A function of one argument, with a time limit.

    Args:
        make: Makes the function, in the process; picklable, and of no main module, which is not
            run there again. The function may be async; argument and result are picklable.
        name: Names it in messages, and in the names of the threads.
        timeout_s: Maximum time of a call in seconds; infinite: until its caller is cancelled.
        processes: Number of processes that are started as soon as they are needed.
        most: Maximum number of processes; those beyond `processes` are started when a call has
            waited for half a second.

    Raises:
        ValueError: `timeout_s` is not above 0.
    """

    def __init__(
        self,
        make: Callable[[], Callable[[A], object]],
        *,
        name: str,
        timeout_s: float = math.inf,
        processes: int,
        most: int = 0,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
        self._make = make
        self._name = name
        self._timeout_s = timeout_s
        self._few, self._most = processes, max(processes, most)
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._count = 0
        _functions.add(self)

    async def __call__(self, argument: A) -> R:
        """Calls the function.

        Raises:
            TimeoutError: It took too long; the message gives its place in the code.
            TimeLimitedError: It could not be made, it raised, its process died, or the argument or
                the result cannot be pickled.
        """
        caller = _Caller()
        submitted = self._threads.submit(self._call, argument, caller)
        call = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError as cancelled:
            caller.leave()
            submitted.cancel()  # which ends one that has not begun
            await asyncio.wait([call], timeout=_PLACE_S)
            if call.done() and not call.cancelled() and (late := call.exception()) is not None:
                cancelled.add_note(f"{self._name}: {late}")
            raise

    def call_now(self, argument: A, timeout_s: float) -> R:
        """Calls the function from a thread that waits, with its own limit; see `__call__`."""
        return self._call(argument, _Caller(), timeout_s)

    def _call(self, argument: A, caller: _Caller, timeout_s: float | None = None) -> R:
        """In a thread of the pool."""
        process = self._take()
        whole = False
        began = time.monotonic()
        try:
            with caller.waits_for(process):
                done, answer = process.ask(argument, timeout_s or self._timeout_s)
            whole = True
        except TimeoutError:
            took_s = time.monotonic() - began
            place = process.place()
            if caller.left and took_s >= _NOTEWORTHY_S:  # nobody takes the error below
                _log.warning("%s is ended after %.3g s at %s", self._name, took_s, place)
            raise TimeoutError(f"it was at {place}") from None
        except (EOFError, OSError) as error:
            raise TimeLimitedError(f"its process died with exit code {process.kill()}") from error
        except TimeLimitedError:
            whole = True
            raise
        finally:
            self._give_back(process, whole)
        if not done:
            assert isinstance(answer, tuple), "what `_answer` returned"
            text, *whole_error = answer
            raise TimeLimitedError(text) from RemoteError(*whole_error)
        return answer  # type: ignore[return-value]  # what the function of type A -> R returned

    def _take(self) -> _Process:
        """Returns a process that serves nobody else.

        Raises:
            TimeLimitedError: None is free, and the function could not be made in a new one.
        """
        starts, patience_s = False, _ANOTHER_S if self._count >= self._few else 0
        while not starts:
            with suppress(queue.Empty):
                return self._idle.get(timeout=patience_s)
            with self._lock:
                starts = self._count < self._most
                self._count += starts
            patience_s = _ANOTHER_S
        try:
            return _Process(self._make)
        except BaseException:
            self._count_less()
            raise

    def _give_back(self, process: _Process, whole: bool) -> None:
        if whole:
            self._idle.put(process)
        else:
            process.kill()
            self._count_less()

    def _count_less(self) -> None:
        with self._lock:
            self._count -= 1

    def end_idle(self) -> None:
        """Ends the processes that serve no call; the next one starts another. Blocks."""
        with suppress(queue.Empty):
            while True:
                self._give_back(self._idle.get_nowait(), whole=False)


def end_idle_processes() -> None:
    """Ends the processes of all functions here that serve no call, as at the end of a run."""
    for function in list(_functions):
        function.end_idle()


_functions: weakref.WeakSet[TimeLimited[Any, Any]] = weakref.WeakSet()


class _Caller:
    """One caller, which may be cancelled: then nobody waits for the process any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.left = False
        self._process: _Process | None = None

    def leave(self) -> None:
        """In the event loop: interrupts the call, or lets it not begin."""
        with self._lock:
            self.left = True
            if self._process is not None:
                self._process.interrupt()

    @contextmanager
    def waits_for(self, process: _Process) -> Iterator[None]:
        """In the thread, around the call.

        Raises:
            TimeLimitedError: The caller left before.
        """
        with self._lock:
            if self.left:
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
        ours, theirs = socket.socketpair()
        self._dump, dump = os.pipe()
        self._left, self._leave = os.pipe()
        flags = ["-P", *["-B"] * sys.dont_write_bytecode]
        program = [sys.executable, *flags, "-c", _PROGRAM, str(theirs.fileno()), str(dump)]
        self._exit_code: int | None = None
        self._connection = Connection(ours.detach())
        try:
            with theirs:
                self._supervisor = subprocess.Popen(
                    supervised(program),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": child_python_path()},
                    pass_fds=(theirs.fileno(), dump),
                    start_new_session=True,  # Ctrl-C is for the other end, which decides
                )
        finally:
            os.close(dump)
        try:
            self._connection.send_bytes(pickle.dumps(make))
            made, self._pid = self._receive(_START_S)
        except TimeoutError:
            self.kill()
            raise TimeLimitedError(f"its process did not start within {_START_S:g} s") from None
        except (EOFError, OSError) as error:
            raise TimeLimitedError(f"its process died with exit code {self.kill()}") from error
        if not made:
            self.kill()
            raise TimeLimitedError(f"it cannot be made: {self._pid}")

    def ask(self, argument: object, timeout_s: float) -> tuple[bool, object]:
        """Returns whether the function returned, and what; or the text of its error.

        Raises:
            TimeoutError: It took too long, or `interrupt` was called.
        """
        try:
            packed = pickle.dumps(argument)
        except Exception as error:  # a border: pickle raises whatever the argument's classes do
            raise TimeLimitedError(f"its argument cannot be pickled: {_text(error)}") from error
        self._connection.send_bytes(packed)
        return self._receive(timeout_s)

    def interrupt(self) -> None:
        """Has `ask` return, from another thread; the process is of no use then."""
        os.write(self._leave, b"x")

    def place(self) -> str:
        """Returns the file and line that the process executes, whatever holds its lock."""
        assert isinstance(self._pid, int)
        text, patience_s = b"", _PLACE_S
        if self._supervisor.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGUSR1)
            # It is written piece by piece, and nothing says which is the last.
            while select.select([self._dump], [], [], patience_s)[0]:
                text += os.read(self._dump, 1 << 16)
                patience_s = _PIECE_S
        return dumped_place(text.decode(errors="replace")) or "an unknown place"

    def kill(self) -> int:
        """Ends the process and what it started; returns its exit code."""
        if self._exit_code is None:
            end_now(self._supervisor)
            self._exit_code = self._supervisor.wait()
            self._connection.close()
            for descriptor in (self._dump, self._left, self._leave):
                os.close(descriptor)
        return self._exit_code

    def _receive(self, timeout_s: float) -> tuple[bool, object]:
        limit_s = None if timeout_s == math.inf else timeout_s
        if self._connection not in wait([self._connection, self._left], limit_s):
            raise TimeoutError
        packed = self._connection.recv_bytes()
        try:
            done, answer = pickle.loads(packed)
        except Exception as error:  # a border, as in `ask`
            raise TimeLimitedError(f"its result cannot be unpickled: {_text(error)}") from error
        return done, answer


def serve(socket_number: str, dump: str) -> None:
    """The process: answers what comes until the other end is gone."""
    faulthandler.register(signal.SIGUSR1, file=int(dump), all_threads=False)
    connection = Connection(int(socket_number))
    try:
        function: Callable[[object], object] = pickle.loads(connection.recv_bytes())()
    except Exception as error:  # a border, as below
        connection.send((False, _text(error)))
        return
    connection.send((True, os.getpid()))
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
        return pickle.dumps((False, (_text(error), *_whole(error))))


def _whole(error: Exception) -> tuple[str, traceback.FrameSummary | None]:
    """Returns what a `RemoteError` holds."""
    return "".join(traceback.format_exception(error)), user_frame(error)


def _text(error: Exception) -> str:
    place = user_place(error)  # the traceback stays in this process
    return f"{type(error).__name__}: {error}" + ("" if place is None else f" ({place})")
