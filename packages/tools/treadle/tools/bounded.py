"""A function with a time limit: called in a process of its own, which is killed when it is slow.

Only a process can be stopped in the middle of a computation, and what tools and rewards compute on
is what a model wrote: simplifying its formula, or running into a loop on it, can take for ever.

Invariant: a call gets exactly one answer: the function's result, its error, or `TimeoutError`. A
process that was killed or died is replaced at the next call. The limit counts from the moment that
a process takes the call.

The caller awaits a thread of this object's own pool, one per process; the thread waits for its
process, at most the limit. The processes end with this one.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")

_START_S = 120.0
"""For a process to start and to import what the function needs; not part of the limit."""


class BoundedError(Exception):
    """The function raised, or its process died; the text says which."""


class Bounded(Generic[A, R]):
    """A function of one argument, with a time limit.

    Args:
        make: Makes the function, in the process; picklable. The function may be async; argument
            and result are picklable.
        name: Of the processes' threads.
        timeout_s: Seconds that one call may take.
        processes: How many calls run at the same time.

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
            raise ValueError(f"timeout_s is {timeout_s}; it must be above 0")
        self._make = make
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix=name)
        self._own = threading.local()

    async def __call__(self, argument: A) -> R:
        """Calls the function.

        Raises:
            TimeoutError: It took too long.
            BoundedError: It raised, or its process died.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, argument)

    def _call(self, argument: A) -> R:
        """In a thread of the pool, which keeps its process from call to call."""
        process: _Process | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = _Process(self._make)
        try:
            done, answer = process.ask(argument, self._timeout_s)
        except TimeoutError:
            self._own.process = None
            process.kill()
            raise
        except (EOFError, OSError) as error:
            self._own.process = None
            raise BoundedError(f"its process died with exit code {process.kill()}") from error
        if not done:
            raise BoundedError(answer)
        return answer  # type: ignore[return-value]  # what the function of type A -> R returned


class _Process:
    """One process, which answers one call at a time."""

    def __init__(self, make: Callable[[], Callable[[A], object]]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def ask(self, argument: object, timeout_s: float) -> tuple[bool, object]:
        """Returns whether the function returned, and what; or the text of its error."""
        if not self._ready:
            self._receive(_START_S)
            self._ready = True
        self._connection.send(argument)
        done, answer = self._receive(timeout_s)
        return done, answer

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
        done, answer = self._connection.recv()
        return done, answer


def _serve(connection: Connection, make: Callable[[], Callable[[object], object]]) -> None:
    """The process: answers what comes until the other end is gone."""
    function = make()
    connection.send((True, None))
    while True:
        try:
            argument = connection.recv()
        except EOFError:
            return
        try:
            answer = function(argument)
            if inspect.iscoroutine(answer):
                answer = asyncio.run(answer)
        except Exception as error:  # a border: whatever the function raises is an answer
            connection.send((False, f"{type(error).__name__}: {error}"))
        else:
            connection.send((True, answer))
