"""The compute thread: the one thread on which an engine's tensors live.

Invariant: calls and turns run one at a time, calls in the order in which they were made,
all on this thread and in inference mode. Every call that has come is run before the next
turn, so a call waits for at most one turn.

Who wakes whom: the event loop puts a call into the mailbox, which wakes the thread when it
has nothing to do. The thread hands results and the outbox of its turns back by one
`loop.call_soon_threadsafe` after the calls and one after the turn. Neither side holds a
lock while the other works, and the mailbox holds at most the calls that are awaited.

A function given to `call` may raise: its caller gets the exception and the thread goes on.
An exception from a turn breaks the thread for good: it ends, and every open and later call
raises `EngineFailed`.
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


class Turns(Protocol):
    """What the thread does when no call waits; all of it runs on the thread."""

    @property
    def runnable(self) -> bool:
        """Whether a turn has something to do."""

    def step(self) -> None:
        """One turn."""

    def take_outbox(self) -> list[Callable[[], None]]:
        """What is to be called on the event loop, which is then forgotten here."""

    def fail(self, error: BaseException) -> None:
        """The thread is broken: whom to tell goes into the outbox."""


class ComputeThread:
    """Starts at once, on the event loop that it serves; `aclose` ends and joins it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._mailbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._turns: Turns | None = None
        self._failure: BaseException | None = None
        self._open_calls: set[asyncio.Future[Any]] = set()
        self._results: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the thread; returns its result or raises its exception.

        Once called it runs, even when the caller is cancelled.

        Raises:
            EngineFailed: The thread is broken.
        """
        self.check()
        with self.open_call() as future:
            self._mailbox.put(partial(self._run, function, future))
            result: T = await future
            return result

    @contextlib.contextmanager
    def open_call(self) -> Iterator[asyncio.Future[Any]]:
        """A future that fails when the thread breaks."""
        future = self._loop.create_future()
        self._open_calls.add(future)
        try:
            yield future
        finally:
            self._open_calls.discard(future)

    async def serve(self, turns: Turns) -> None:
        """From now on takes these turns."""
        await self.call(lambda: setattr(self, "_turns", turns))

    def check(self) -> None:
        """Raises `EngineFailed` if the thread is broken."""
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
                    self._hand_over()
                    if self._turns is not None and self._turns.runnable:
                        self._turns.step()
                        self._hand_over()
        except BaseException as error:
            self._break(error)

    def _run_calls(self) -> bool:
        """Runs the calls in the mailbox, waiting for one if there is nothing else to do.

        Returns:
            False when the thread is to end.
        """
        idle = self._turns is None or not self._turns.runnable
        try:
            while (call := self._mailbox.get(block=idle)) is not None:
                call()
                idle = False
        except queue.Empty:
            return True
        self._hand_over()
        return False

    def _run(self, function: Callable[[], T], future: asyncio.Future[T]) -> None:
        try:
            settle = partial(_settle, future, function(), None)
        except Exception as error:
            settle = partial(_settle, future, None, error)
        self._results.append(settle)

    def _hand_over(self) -> None:
        outbox = [] if self._turns is None else self._turns.take_outbox()
        results, self._results = self._results, []
        if outbox or results:
            self._loop.call_soon_threadsafe(_call_all, [*outbox, *results])

    def _break(self, error: BaseException) -> None:
        self._failure = error
        if self._turns is not None:
            self._turns.fail(error)
        self._results.append(self._fail_open_calls)
        self._hand_over()

    def _fail_open_calls(self) -> None:
        assert self._failure is not None
        for future in self._open_calls:
            _settle(future, None, EngineFailed("torch", self._failure))


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():  # Its caller was cancelled.
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
