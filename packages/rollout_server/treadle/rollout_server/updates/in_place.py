"""The update in place: one session whose tensors overwrite the engine's as they come.

Invariant: from `begin` to the end of its task the server is UPDATING and the engine paused, and
nobody else tells the engine anything. When the task ends the engine serves the new version
whole, or it holds what it held (no tensor was asked for yet), or the server is LOADING. Which
of these, the task decides alone, by whether the engine's load came to its end after Commit.

Who waits: `opened` for the pause; the task for the engine's load; the load for tensors, or for
the senders of its group; then for `commit`. Who wakes them: the session's end cancels the load.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from treadle.rollout_server.engine import Engine, InFlightPolicy
from treadle.rollout_server.errors import RolloutServerError, UpdateUnknown
from treadle.rollout_server.scheduling.engine_controller import EngineSeat
from treadle.rollout_server.updates.current_update import UpdateSlot
from treadle.rollout_server.updates.weight_update import UpdateSession

_log = logging.getLogger(__name__)
Load: TypeAlias = Callable[[Engine], Awaitable[None]]


class InPlaceUpdate:
    """Starts at once.

    Args:
        seat: Of the engine.
        slot: Holds the session.
        session: In place, and new.
        policy: What becomes of the sequences in flight.
        load: Makes the engine read from the session, to its end or until cancelled.
    """

    def __init__(
        self,
        seat: EngineSeat,
        slot: UpdateSlot,
        session: UpdateSession,
        policy: InFlightPolicy,
        load: Load,
    ) -> None:
        self.session = session
        self._seat = seat
        self._slot = slot
        self._policy = policy
        self._load = load
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._committing = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(), name=f"update {session.update_id} in place")
        self._task.add_done_callback(self._settle)

    @property
    def done(self) -> bool:
        """Whether the server has left the update."""
        return self._task.done()

    async def opened(self) -> None:
        """Returns when the engine has paused and takes tensors.

        Raises:
            RolloutServerError: It never will.
        """
        await asyncio.shield(self._opened)

    async def commit(self) -> int:
        """Waits for the engine to have written everything; the version that serves then.

        Raises:
            UpdateIncomplete: Bytes are missing.
            RolloutServerError: The engine did not take them.
        """
        if not self._committing.is_set():
            self.session.begin_commit()
            self._committing.set()
        return await asyncio.shield(self._task)

    def give_up(self) -> None:
        """Cancels the engine's load, if it has begun: its tensors will not come."""
        if self._working is not None:
            self._working.cancel()

    async def ended(self) -> None:
        """Returns when the server has left the update, whatever became of it."""
        await asyncio.wait({self._task})

    async def _run(self) -> int:
        seat, session = self._seat, self.session
        async with seat.control:
            if session.state.ended:
                raise UpdateUnknown(session.update_id, session.state.value)
            try:
                seat.check_update("BeginUpdate", self._policy)
            except RolloutServerError:
                self._slot.abort(session.update_id)
                raise
            self._working = asyncio.create_task(self._work())
            session.when_dropped = self.give_up
            await asyncio.wait({self._working})
            session.when_dropped = None
            error = self._error_of(self._working)
            self._working = None
            if error is None:
                seat.weight_version = session.weight_version
                self._slot.committed()
                await seat.leave_update(mixed=False)
                return session.weight_version
            if not session.state.ended:
                self._slot.failed()
            await seat.leave_update(mixed=seat.mixed or self._opened.done())
            raise error

    async def _work(self) -> None:
        engine = await self._seat.enter_update(self._policy)
        self._opened.set_result(None)
        await self._load(engine)
        await self._committing.wait()

    def _error_of(self, work: asyncio.Task[None]) -> RolloutServerError | None:
        if work.cancelled():
            if self._seat.failure is not None:
                return self._seat.failure
            return UpdateUnknown(self.session.update_id, self.session.state.value)
        error = work.exception()
        if error is None:
            return None
        if not isinstance(error, Exception):
            raise error
        return self._seat.fail(error)

    def _settle(self, task: asyncio.Task[int]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        _log.warning("%s: %s", task.get_name(), error)
        # Its frames hold bytes that the engine was given. They are let go of, not cleared: some
        # may belong to a coroutine that still waits.
        error.__traceback__ = None
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # Seen: whoever began it may have left.
