"""The request queue: where calls wait for a slot in the engine.

Invariant: a task is inside `slot()` exactly while its ticket runs in `Admission`. Leaving, for
whatever reason, gives the slot to the next call. An engine may keep an admitted sequence waiting,
so an admitted call counts as started only once `Slot.started` is called.

Who waits: a queued call, on its own future. Who wakes it: a call that leaves, `resume_admission`,
or `reject_waiting`, which ends every call that has not started, queued or admitted, with an error.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.errors import Overloaded, RolloutServerError
from treadle.rollout_server.scheduling.admission import Admission, Admitted, Rejected


class Slot:
    """A call that is admitted, or will be."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self._cancelling = task.cancelling()
        self._error: RolloutServerError | None = None
        self.has_started = False

    def started(self) -> None:
        """Marks the call as started: from now on it is not rejected."""
        self.has_started = True

    def reject(self, error: RolloutServerError) -> None:
        """Cancels the call, which then leaves with `error`. Only the first call has an effect."""
        # The call that rejects the others raises its own error; cancelled, it could not.
        own = self._task is asyncio.current_task()
        if not self.has_started and self._error is None and not own:
            self._error = error
            self._task.cancel()

    def rejection(self) -> RolloutServerError | None:
        """Returns the error that a cancelled call leaves with; None if others cancelled it too."""
        if self._error is not None and self._task.uncancel() <= self._cancelling:
            return self._error
        return None


class RequestQueue:
    """Lets tasks wait for an `Admission`."""

    def __init__(self, admission: Admission, clock: Clock) -> None:
        self._admission = admission
        self._clock = clock
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._slots: dict[int, Slot] = {}

    @asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[Slot]:
        """Waits for a slot and holds it. The block runs in one task.

        Raises:
            Overloaded: The queue is full.
            RolloutServerError: The error given to `reject_waiting`.
        """
        verdict = self._admission.admit(priority, self._clock.time())
        if isinstance(verdict, Rejected):
            raise Overloaded(
                self._admission.in_flight, self._admission.queued, verdict.retry_after_s
            )
        task = asyncio.current_task()
        assert task is not None
        slot = self._slots[verdict.ticket] = Slot(task)
        try:
            if not isinstance(verdict, Admitted):
                await self._wait(verdict.ticket)
            try:
                yield slot
            finally:
                self._wake(self._admission.finish(verdict.ticket, self._clock.time()))
        except asyncio.CancelledError:
            if (rejection := slot.rejection()) is not None:
                raise rejection from None
            raise
        finally:
            self._slots.pop(verdict.ticket, None)

    def pause_admission(self) -> None:
        """Admits no more calls; they queue. Idempotent."""
        self._admission.pause()

    def resume_admission(self) -> None:
        """Ends `pause_admission`."""
        self._wake(self._admission.resume(self._clock.time()))

    def reject_waiting(self, error: RolloutServerError) -> None:
        """Fails every call that has not started with `error`."""
        for ticket in self._admission.empty_queue():
            turn = self._waiting.pop(ticket)
            del self._slots[ticket]
            if not turn.done():  # Else its call was cancelled in this instant.
                turn.set_exception(error)
        for slot in self._slots.values():
            slot.reject(error)

    async def _wait(self, ticket: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = turn
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(ticket, None)
            self._wake(self._admission.cancel(ticket, self._clock.time()))
            raise

    def _wake(self, tickets: tuple[int, ...]) -> None:
        for ticket in tickets:
            turn = self._waiting.pop(ticket)
            if not turn.done():  # Else its call was cancelled and will hand the slot on.
                turn.set_result(None)
