"""The compute thread: the only thread that uses an engine's tensors.

Invariant: calls and steps run one at a time on this thread, calls in order, all in inference
mode. Every pending call runs before the next step, so a call waits for at most one step.

Who wakes whom: the event loop puts a call into the mailbox, which wakes the thread if it is
idle. The thread returns results and the outbox of its steps by one `loop.call_soon_threadsafe`
after the calls and one after the step. Neither side holds a lock while the other works, and
the mailbox contains only calls that are awaited.

A function passed to `call` may raise: its caller gets the exception and the thread continues.
An exception from a step ends the thread, and every open and later call raises `EngineFailed`.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from treadle.rollout_server.errors import EngineFailed

T = TypeVar("T")


class Steppable(Protocol):
    """Work that the thread does while no call is pending; all methods run on the thread."""

    @property
    def runnable(self) -> bool:
        """Whether `step` has work."""

    def step(self) -> None:
        """Runs one step."""

    def take_outbox(self) -> list[Callable[[], None]]:
        """Removes and returns the callbacks for the event loop."""

    def fail(self, error: BaseException) -> None:
        """Puts the notifications of a failed thread into the outbox."""


class ComputeThread:
    """A thread that serves the running event loop; `aclose` ends and joins it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._mailbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._steps: Steppable | None = None
        self._failure: BaseException | None = None
        self._open_calls: set[asyncio.Future[Any]] = set()
        self._results: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the thread; returns its result or raises its exception.

        The function runs even if the caller is cancelled.

        Raises:
            EngineFailed: The thread has failed.
        """
        self.check()
        with self.open_call() as future:
            self._mailbox.put(partial(self._run, function, future))
            result: T = await future
            return result

    @contextlib.contextmanager
    def open_call(self) -> Iterator[asyncio.Future[Any]]:
        """Yields a future that fails when the thread does."""
        future = self._loop.create_future()
        self._open_calls.add(future)
        try:
            yield future
        finally:
            self._open_calls.discard(future)

    async def run_steps(self, steps: Steppable) -> None:
        """Starts to run steps whenever there is work."""
        await self.call(lambda: setattr(self, "_steps", steps))

    def check(self) -> None:
        """Raises `EngineFailed` if the thread has failed."""
        if self._failure is not None:
            raise EngineFailed("torch", self._failure) from self._failure

    async def aclose(self) -> None:
        """Ends the thread after the calls made so far, and joins it. Idempotent."""
        self._mailbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while self._run_calls():
                    self._deliver()
                    if self._steps is not None and self._steps.runnable:
                        self._steps.step()
                        self._deliver()
        except BaseException as error:
            self._fail(error)

    def _run_calls(self) -> bool:
        """Runs the calls in the mailbox; waits for one if there is no other work.

        Returns:
            False if the thread should end.
        """
        idle = self._steps is None or not self._steps.runnable
        try:
            while (call := self._mailbox.get(block=idle)) is not None:
                call()
                idle = False
        except queue.Empty:
            return True
        self._deliver()
        return False

    def _run(self, function: Callable[[], T], future: asyncio.Future[T]) -> None:
        try:
            resolve = partial(_resolve, future, function(), None)
        except Exception as error:
            resolve = partial(_resolve, future, None, error)
        self._results.append(resolve)

    def _deliver(self) -> None:
        outbox = [] if self._steps is None else self._steps.take_outbox()
        results, self._results = self._results, []
        if outbox or results:
            self._loop.call_soon_threadsafe(_call_all, [*outbox, *results])

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        if self._steps is not None:
            self._steps.fail(error)
        self._results.append(self._fail_open_calls)
        self._deliver()

    def _fail_open_calls(self) -> None:
        assert self._failure is not None
        for future in self._open_calls:
            _resolve(future, None, EngineFailed("torch", self._failure))


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def _resolve(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():  # The caller was cancelled.
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
