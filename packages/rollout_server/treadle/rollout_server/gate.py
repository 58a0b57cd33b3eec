"""The gate: where calls wait for their place in the engine.

Invariant: a task is inside `place()` exactly while its ticket runs in `Admission`; leaving,
however it happens, gives the place to the next one.

Who waits: a queued call, on its own future. Who wakes it: the call that leaves, `release`,
or `turn_away`, which wakes all of them with an error.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from treadle.rollout_server.admission import Admission, Admitted, Rejected
from treadle.rollout_server.clock import Clock
from treadle.rollout_server.errors import Overloaded, RolloutServerError


class AdmissionGate:
    """Lets tasks wait for an `Admission`."""

    def __init__(self, admission: Admission, clock: Clock) -> None:
        self._admission = admission
        self._clock = clock
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def place(self, priority: int) -> AsyncIterator[None]:
        """Waits for a place and holds it.

        Raises:
            Overloaded: The queue is full.
            RolloutServerError: What `turn_away` was given.
        """
        verdict = self._admission.admit(priority, self._clock.time())
        if isinstance(verdict, Rejected):
            raise Overloaded(
                self._admission.in_flight, self._admission.queued, verdict.retry_after_s
            )
        if not isinstance(verdict, Admitted):
            await self._wait(verdict.ticket)
        try:
            yield
        finally:
            self._wake(self._admission.finish(verdict.ticket, self._clock.time()))

    def hold(self) -> None:
        """Lets no more calls in; they queue. Idempotent."""
        self._admission.hold()

    def release(self) -> None:
        """Ends `hold`."""
        self._wake(self._admission.release(self._clock.time()))

    def turn_away(self, error: RolloutServerError) -> None:
        """Fails every queued call with `error`."""
        for ticket in self._admission.empty_queue():
            turn = self._waiting.pop(ticket)
            if not turn.done():  # Else its call was cancelled in this instant.
                turn.set_exception(error)

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
