"""The gate: where calls wait for their place in the engine.

Invariant: a task is inside `place()` exactly while its ticket runs in `Admission`; leaving,
however it happens, gives the place to the next one. Inside, it has started once it says so:
an engine may keep sequences waiting that the gate has let in.

Who waits: a queued call, on its own future. Who wakes it: the call that leaves, `release`,
or `turn_away`, which ends all calls that have not started, inside and outside, with an error.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.errors import Overloaded, RolloutServerError
from treadle.rollout_server.scheduling.admission import Admission, Admitted, Rejected


class Place:
    """A call that was let in, or will be."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self._cancelling = task.cancelling()
        self._error: RolloutServerError | None = None
        self.has_started = False

    def started(self) -> None:
        """From now on the call is no longer turned away."""
        self.has_started = True

    def turn_away(self, error: RolloutServerError) -> None:
        """Cancels the call, which leaves with `error`. Once; not a call that asks for it itself.

        Such a call leaves with an error of its own: cancelled, it could not tell its caller.
        """
        own = self._task is asyncio.current_task()
        if not self.has_started and self._error is None and not own:
            self._error = error
            self._task.cancel()

    def refusal(self) -> RolloutServerError | None:
        """What a call that was cancelled leaves with; None: others cancelled it (too)."""
        if self._error is not None and self._task.uncancel() <= self._cancelling:
            return self._error
        return None


class AdmissionGate:
    """Lets tasks wait for an `Admission`."""

    def __init__(self, admission: Admission, clock: Clock) -> None:
        self._admission = admission
        self._clock = clock
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._places: dict[int, Place] = {}

    @asynccontextmanager
    async def place(self, priority: int) -> AsyncIterator[Place]:
        """Waits for a place and holds it. The block runs in one task.

        Raises:
            Overloaded: The queue is full.
            RolloutServerError: What `turn_away` was given.
        """
        verdict = self._admission.admit(priority, self._clock.time())
        if isinstance(verdict, Rejected):
            raise Overloaded(
                self._admission.in_flight, self._admission.queued, verdict.retry_after_s
            )
        task = asyncio.current_task()
        assert task is not None
        place = self._places[verdict.ticket] = Place(task)
        try:
            if not isinstance(verdict, Admitted):
                await self._wait(verdict.ticket)
            try:
                yield place
            finally:
                self._wake(self._admission.finish(verdict.ticket, self._clock.time()))
        except asyncio.CancelledError:
            if (refusal := place.refusal()) is not None:
                raise refusal from None
            raise
        finally:
            self._places.pop(verdict.ticket, None)

    def hold(self) -> None:
        """Lets no more calls in; they queue. Idempotent."""
        self._admission.hold()

    def release(self) -> None:
        """Ends `hold`."""
        self._wake(self._admission.release(self._clock.time()))

    def turn_away(self, error: RolloutServerError) -> None:
        """Fails every call that has not started with `error`."""
        for ticket in self._admission.empty_queue():
            turn = self._waiting.pop(ticket)
            del self._places[ticket]
            if not turn.done():  # Else its call was cancelled in this instant.
                turn.set_exception(error)
        for place in self._places.values():
            place.turn_away(error)

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
            if not turn.done():  # Else its call was cancelled and will hand the place on.
                turn.set_result(None)
