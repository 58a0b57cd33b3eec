"""The weight updater: applies updates to the engine.

`weight_update.py` owns the transaction; this module owns its effect: it opens updates, reads their
files, has the engine load on commit, keeps the base of deltas, and reports how each update ended.

Invariant: at most one task has the engine load. A staged update changes nothing before its
commit, and a commit that the engine refuses changes nothing either. An update in place begins with
a pause; see `in_place.py`.

Who waits: `commit` for the engine, together with every other caller of it; it continues when they
give up. `begin` for the pause in place and for the files to be read, likewise. The tasks are
owned here, and `aclose` waits for them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.config.schema import WeightsConfig
from treadle.rollout_server.engine import InFlightPolicy, NamedTensor
from treadle.rollout_server.errors import (
    EngineFailed,
    StateConflict,
    UpdateUnknown,
    WeightVersionBehind,
)
from treadle.rollout_server.scheduling.engine_controller import EngineController
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.tensors import check_tensors
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.delta import DeltaBase, as_base
from treadle.rollout_server.updates.files import WeightFiles, stage_files
from treadle.rollout_server.updates.in_place import InPlaceUpdate
from treadle.rollout_server.updates.staging import Assembler
from treadle.rollout_server.updates.weight_update import CurrentUpdate, UpdateState, WeightUpdate

_log = logging.getLogger(__name__)


class WeightUpdater:
    """See the module docstring."""

    def __init__(self, controller: EngineController, config: WeightsConfig, clock: Clock) -> None:
        self.current = CurrentUpdate(clock, max_chunk_bytes=config.max_chunk_bytes)
        self._controller = controller
        self._config = config
        self._clock = clock
        self._commit: tuple[str, asyncio.Task[int]] | None = None
        self._in_place: InPlaceUpdate | None = None
        self._readings: dict[WeightUpdate, asyncio.Task[None]] = {}
        self._base: DeltaBase | None = None
        controller.lifecycle.observe(self._drop_with_engine)

    def refuse_while_in_place(self, call: str) -> None:
        """Raises `StateConflict` while an update in place holds the engine."""
        in_place = self._in_place
        if in_place is not None and not in_place.done:
            name = in_place.update.update_id
            raise StateConflict(
                call, f"being updated in place by {name!r}", "commit or abort that update first"
            )

    async def begin(self, begin: Begin) -> WeightUpdate:
        """Opens an update, or returns the live or last committed one that `begin` repeats.

        In place, waits for the engine to pause. From files, waits until they are read; a failure
        drops the update, but not the base of deltas.

        Raises:
            WeightVersionBehind: The version is not newer than the one that serves.
            TensorMismatch: The tensors are not the engine's.
            UpdateInProgress: Another update is live.
            StateConflict: In place, the weights' memory is released.
            CapabilityMissing: The engine does not support the policy.
            DeltaBaseMismatch: The base of the delta is not held.
            RolloutServerError: The files do not hold what was announced.
        """
        controller = self._controller
        info = controller.engine.info
        check_tensors(info.parameters, begin.tensors)
        if self.current.begun(begin) is None or controller.mixed:
            self._check(begin)
        update = self.current.begin(begin, split_tensors=info.capabilities.split_tensors)
        if update.state is UpdateState.COMMITTED:
            return update
        if begin.delta is None:  # Two copies are not held.
            self._base = None
        if begin.is_in_place:
            if self._in_place is None or self._in_place.update is not update:
                self._in_place = InPlaceUpdate(controller, self.current, update)
            with update.working(self._clock):
                await self._in_place.opened()
        if isinstance(begin.source, WeightFiles):
            await self._ensure_read(update, begin.source)
        return update

    async def commit(self, update_id: str, policy: InFlightPolicy | None) -> int:
        """Switches to the weights of an update; joins a commit that is under way.

        Args:
            update_id: The live update, or one that was committed.
            policy: The treatment of in-flight completions; ignored in place, where Begin has it.

        Returns:
            The version that serves now.

        Raises:
            UpdateUnknown: The update is neither live nor was it committed.
            RolloutServerError: Bytes are missing, the state forbids it, or the engine failed.
        """
        version = self.current.committed_version(update_id)
        if version is not None:
            return version
        live = self.current.live
        if live is not None and live.update_id == update_id and live.begin.is_in_place:
            assert self._in_place is not None
            self.current.find(update_id)
            return await self._in_place.commit()
        if self._commit is None or self._commit[1].done():
            assert policy is not None
            update = self.current.find(update_id)
            self._controller.engine_for(policy)
            task = asyncio.create_task(self._switch(update, policy), name=f"commit {update_id}")
            task.add_done_callback(self._forget_commit)
            self._commit = (update_id, task)
        elif self._commit[0] != update_id:
            raise UpdateUnknown(update_id, "is not the update that is being committed")
        return await asyncio.shield(self._commit[1])

    async def abort(self, update_id: str) -> None:
        """Drops an update; waits for the engine to let it go.

        Raises:
            StateConflict: It is being committed, or it was.
            UpdateUnknown: It was never begun, or it ended in another way.
        """
        live = self.current.live
        committing = self._commit is not None and self._commit[0] == update_id
        if live is not None and live.update_id == update_id:
            committing |= live.state is UpdateState.COMMITTING
        if committing or self.current.committed_version(update_id) is not None:
            fix = f"the commit of {update_id!r} runs to its end; call CommitUpdate to learn it"
            raise StateConflict("AbortUpdate", self._controller.state.value, fix)
        self.current.abort(update_id)
        if self._in_place is not None and self._in_place.update.update_id == update_id:
            await self._in_place.ended()

    async def aclose(self) -> None:
        """Waits for a commit, drops the live update, and waits until its files are closed."""
        if self._commit is not None:
            await asyncio.wait({self._commit[1]})
        self.current.close()
        if self._readings:
            await asyncio.wait(self._readings.values())
        if self._in_place is not None:
            await self._in_place.ended()

    def _check(self, begin: Begin) -> None:
        """Checks that a new update may begin; raises as `begin`."""
        controller = self._controller
        if begin.weight_version <= controller.weight_version:
            fix = "the trainer is behind, stop it"
            raise WeightVersionBehind(controller.weight_version, begin.weight_version, fix)
        if begin.in_place is not None:
            controller.check_update("BeginUpdate", begin.in_place)
        if begin.delta is not None:
            as_base(begin.tensors, self._base, begin.delta)

    async def _ensure_read(self, update: WeightUpdate, files: WeightFiles) -> None:
        """Waits until the files of an update are read, by this call or an earlier one."""
        reading = self._readings.get(update)
        if reading is None and update.state is UpdateState.OPEN:
            name = f"reading the files of {update.update_id}"
            reading = asyncio.create_task(self._read(update, files), name=name)
            self._readings[update] = reading
            reading.add_done_callback(partial(self._forget_reading, update))
        if reading is not None:
            await asyncio.shield(reading)

    async def _read(self, update: WeightUpdate, files: WeightFiles) -> None:
        """Reads the files of an update in a thread."""
        try:
            with update.working(self._clock):
                await asyncio.to_thread(
                    stage_files,
                    files,
                    update.incoming.assembler,
                    root=self._config.directory,
                    filled=_filled(update),
                    delta=update.begin.delta,
                )
        except BaseException:
            if not update.state.ended:
                self.current.abort(update.update_id)
            raise

    async def _switch(self, update: WeightUpdate, policy: InFlightPolicy) -> int:
        """Has the engine load a staged update; returns the version that serves now."""
        controller, begin = self._controller, update.begin
        with update.working(self._clock):  # Also while it waits for its turn.
            async with controller.control:
                controller.check_update("CommitUpdate", policy)
                update.begin_commit()
                weights = await self._decode(update)
                try:
                    engine = await controller.enter_update(policy)
                    stream = _stream(weights.named_tensors())
                    await engine.load_weights(stream, version=begin.weight_version)
                except Exception as error:
                    if begin.delta is not None and self._base is not None:
                        await asyncio.to_thread(self._base.undo, update.incoming.assembler)
                    update.commit_failed()
                    failure = controller.fail(error)
                    if isinstance(failure, EngineFailed):
                        # It may have failed while the commit kept the update.
                        self.current.close()
                    else:  # What was there is still there.
                        await controller.leave_update(mixed=controller.mixed)
                    raise failure from error
                controller.weight_version = begin.weight_version
                kept = begin.keep_base or begin.delta is not None
                self._base = DeltaBase(begin.weight_version, weights) if kept else None
                self.current.committed()
                await controller.leave_update(mixed=False)
                return begin.weight_version

    async def _decode(self, update: WeightUpdate) -> Assembler:
        """Returns the weights of an update that is complete.

        Raises:
            DeltaBaseMismatch: Its delta does not lead to what was announced; the update is
                dropped, and so is the base.
        """
        begin = update.begin
        if begin.delta is None:
            return update.incoming.assembler
        try:
            base = as_base(begin.tensors, self._base, begin.delta)
            await asyncio.to_thread(base.apply, begin.delta, update.incoming.assembler)
        except Exception:
            self._base = None
            update.commit_failed()
            self.current.abort(update.update_id)
            raise
        return base.weights

    def _forget_reading(self, update: WeightUpdate, task: asyncio.Task[None]) -> None:
        del self._readings[update]
        _warn(task)

    def _forget_commit(self, task: asyncio.Task[int]) -> None:
        """Drops a commit that ended: its error would hold what the engine was given."""
        if self._commit is not None and self._commit[1] is task:
            self._commit = None
        _warn(task)

    def _drop_with_engine(self, state: ServerState) -> None:
        """Frees an update and a base that an engine that broke cannot use."""
        if state is ServerState.FAILED:
            self._base = None
            self.current.close()
            if self._in_place is not None:
                self._in_place.give_up()


def _warn(task: asyncio.Task[Any]) -> None:
    """Logs why a task failed: its callers may have left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("%s failed: %s", task.get_name(), error)


def _filled(update: WeightUpdate) -> Callable[[int], None]:
    """Returns a callback by which another thread marks a tensor as read.

    During an update in place the callback waits for room.
    """
    loop = asyncio.get_running_loop()
    incoming = update.incoming

    async def take(index: int) -> None:
        incoming.filled(index)
        await incoming.room()

    def filled(index: int) -> None:
        if incoming.queue is None:
            incoming.filled(index)
        else:
            asyncio.run_coroutine_threadsafe(take(index), loop).result()

    return filled


async def _stream(tensors: Iterator[NamedTensor]) -> AsyncIterator[NamedTensor]:
    for tensor in tensors:
        yield tensor
