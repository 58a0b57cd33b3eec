"""A time limit of user code that counts only the time in which the event loop could serve it.

Invariant: while other code holds the loop, nobody's limit runs; what the limited code itself holds
counts. So a tool that blocks is late, and its neighbours are not. Standstill is measured while a
limit is under way: a timer of the loop is due every `_TICK_S`, and what it is late is standstill.

    async with TurningLimit(2.0) as limit:
        await limit.own(tool.call())
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_TICK_S = 0.01
_now = time.monotonic  # as the loop's own time
_standstills: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Standstill]" = WeakKeyDictionary()


class TurningLimit:
    """A time limit for a block, which is cancelled and raises TimeoutError as in asyncio.

    A block that ends by itself after its limit raises TimeoutError too: it held the loop, so that
    nothing could cancel it. Any other error of the block is raised as it is.

    Args:
        limit_s: Maximum time in seconds; None: no limit.

    Attributes:
        expired: Whether the limit, and not the block, has raised the TimeoutError.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.expired = False
        self._limit_s = math.inf if limit_s is None else limit_s
        self._own_s = 0.0
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        known = _standstills.get(self._loop)
        self._standstill = known or _standstills.setdefault(self._loop, _Standstill())
        self._standstill.begin()
        self._started, self._stood_s = self._loop.time(), self._standstill.seconds
        self._timer: asyncio.TimerHandle | None = None
        self._wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        late = self._spent_s() > self._limit_s
        self._standstill.end()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
            if late and error is None:
                raise TimeoutError
        except TimeoutError:
            self.expired = True
            raise

    async def own(self, work: Awaitable[T]) -> T:
        """Awaits the limited code: what it holds the loop for counts against this limit."""
        return await _Steps(_result(work), self._count)

    def _count(self, seconds: float) -> None:
        if seconds > _TICK_S:  # a shorter step is no standstill
            self._own_s += seconds

    def _spent_s(self) -> float:
        others_s = self._standstill.seconds - self._stood_s - self._own_s
        return self._loop.time() - self._started - max(0.0, others_s)

    def _wait(self) -> None:
        left_s = self._limit_s - self._spent_s()
        if left_s <= 0:
            self._timeout.reschedule(self._loop.time())
        elif left_s < math.inf:
            self._timer = self._loop.call_later(left_s, self._wait)


class _Standstill:
    """Measures for how long an event loop did not turn, while somebody asks."""

    def __init__(self) -> None:
        self._total_s, self._due, self._users = 0.0, 0.0, 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float:
        """Seconds so far, the present standstill included."""
        return self._total_s + max(0.0, _now() - self._due)

    def begin(self) -> None:
        self._users += 1
        if self._users == 1:
            self._wait()

    def end(self) -> None:
        self._users -= 1
        if not self._users and self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._due = _now() + _TICK_S
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._total_s = self.seconds
        self._wait()


async def _result(work: Awaitable[T]) -> T:
    return await work


class _Steps(Generic[T]):
    """Awaits `work`, and counts the seconds of each of its steps."""

    def __init__(self, work: Coroutine[Any, Any, T], count: Callable[[float], None]) -> None:
        self._work = work
        self._count = count

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[Any], Any] = self._work.send
        given: Any = None
        try:
            while True:
                began = _now()
                try:
                    waits_for = step(given)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    self._count(_now() - began)
                try:
                    step, given = self._work.send, (yield waits_for)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    step, given = self._work.throw, error
        finally:
            self._work.close()
