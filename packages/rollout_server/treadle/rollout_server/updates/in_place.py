"""The update in place: one update whose tensors overwrite the engine's as they arrive.

Invariant: from `begin` to the end of its task the server is UPDATING and the engine paused, and
only the task commands the engine. When the task ends, the engine serves the whole new version, or
still holds the old weights (if it never paused), or the server is LOADING. The task alone decides
which, by whether the engine's load ended well after Commit.

Who waits: `opened` for the pause; the task for the engine's load; the load for tensors, or for the
senders of its group; then for `commit`. Who wakes them: the end of the update cancels the load.
"""

import asyncio
import logging

from treadle.rollout_server.engine import CollectiveGroup, Engine
from treadle.rollout_server.errors import RolloutServerError, UpdateUnknown
from treadle.rollout_server.scheduling.engine_controller import EngineController
from treadle.rollout_server.updates.weight_update import CurrentUpdate, WeightUpdate

_log = logging.getLogger(__name__)


class InPlaceUpdate:
    """Starts at once."""

    def __init__(
        self, controller: EngineController, current: CurrentUpdate, update: WeightUpdate
    ) -> None:
        assert update.begin.in_place is not None
        self.update = update
        self._controller = controller
        self._current = current
        self._policy = update.begin.in_place
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._committing = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(), name=f"update {update.update_id} in place")
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
        """Waits until the engine has written everything; returns the version that serves then.

        Raises:
            UpdateIncomplete: Bytes are missing.
            RolloutServerError: The engine did not take them.
        """
        if not self._committing.is_set():
            self.update.begin_commit()
            self._committing.set()
        return await asyncio.shield(self._task)

    def give_up(self) -> None:
        """Cancels the engine's load, if it has begun: its tensors will not arrive."""
        if self._working is not None:
            self._working.cancel()

    async def ended(self) -> None:
        """Returns when the server has left the update, in whatever way."""
        await asyncio.wait({self._task})

    async def _run(self) -> int:
        controller, update = self._controller, self.update
        async with controller.control:
            if update.state.ended:
                raise UpdateUnknown(update.update_id, update.state.value)
            try:
                controller.check_update("BeginUpdate", self._policy)
            except RolloutServerError:
                self._current.abort(update.update_id)
                raise
            self._working = asyncio.create_task(self._work())
            update.when_dropped = self.give_up
            await asyncio.wait({self._working})
            update.when_dropped = None
            error = self._error_of(self._working)
            self._working = None
            if error is None:
                controller.weight_version = update.begin.weight_version
                self._current.committed()
                await controller.leave_update(mixed=False)
                return update.begin.weight_version
            if not update.state.ended:
                self._current.failed()
            await controller.leave_update(mixed=controller.mixed or self._opened.done())
            raise error

    async def _work(self) -> None:
        engine = await self._controller.enter_update(self._policy)
        self._opened.set_result(None)
        await self._load(engine)
        await self._committing.wait()

    async def _load(self, engine: Engine) -> None:
        """Makes the engine overwrite its weights with what arrives."""
        begin, queue = self.update.begin, self.update.incoming.queue
        version = begin.weight_version
        if isinstance(begin.source, CollectiveGroup):
            await engine.receive_weights(begin.source, begin.tensors, version=version)
            return
        assert queue is not None
        await engine.load_weights(queue.tensors(), version=version, in_place=True)

    def _error_of(self, work: asyncio.Task[None]) -> RolloutServerError | None:
        if work.cancelled():
            if self._controller.failure is not None:
                return self._controller.failure
            return UpdateUnknown(self.update.update_id, self.update.state.value)
        error = work.exception()
        if error is None:
            return None
        if not isinstance(error, Exception):
            raise error
        return self._controller.fail(error)

    def _settle(self, task: asyncio.Task[int]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        _log.warning("%s: %s", task.get_name(), error)
        # Its frames hold bytes that the engine was given. The frames are dropped, the bytes not
        # cleared: some may belong to a coroutine that still waits.
        error.__traceback__ = None
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # Retrieved: the caller of begin may have left.
