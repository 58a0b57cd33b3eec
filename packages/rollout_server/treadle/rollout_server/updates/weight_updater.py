"""The switch: from the weights that serve to those of one update.

Invariant: at most one update is live, and at most one task tells the engine to load. A staged
update changes nothing before its commit, and a commit that the engine refuses changes nothing
either. An update in place begins by pausing; see `in_place.py`.

Who waits: `commit` for the engine, together with every other caller of it; the engine goes on
when they give up. `begin` for the pause in place and for the files to be read, likewise. The
tasks are owned here, and `aclose` waits for them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.config.schema import WeightsConfig
from treadle.rollout_server.engine import (
    CollectiveGroup,
    Engine,
    InFlightPolicy,
    NamedTensor,
    TensorSpec,
)
from treadle.rollout_server.errors import (
    EngineFailed,
    StateConflict,
    UpdateUnknown,
    WeightVersionBehind,
)
from treadle.rollout_server.scheduling.engine_controller import EngineController
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.tensors import check_tensors
from treadle.rollout_server.updates.assemble import Assembler
from treadle.rollout_server.updates.current_update import CurrentUpdate
from treadle.rollout_server.updates.delta import Delta, DeltaBase, as_base
from treadle.rollout_server.updates.files import WeightFiles, stage_files
from treadle.rollout_server.updates.in_place import InPlaceUpdate
from treadle.rollout_server.updates.weight_update import UpdateState, WeightUpdate

_log = logging.getLogger(__name__)


class WeightUpdater:
    """See the module docstring.

    Args:
        controller: Of the engine.
        config: Bounds of updates.
        clock: Times leases.
    """

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
        """Raises `StateConflict` while an update holds the engine."""
        update = self._in_place
        if update is not None and not update.done:
            name = update.update.update_id
            raise StateConflict(
                call, f"being updated in place by {name!r}", "commit or abort that update first"
            )

    async def begin(
        self,
        update_id: str,
        weight_version: int,
        tensors: Sequence[TensorSpec],
        lease_s: float,
        *,
        in_place: InFlightPolicy | None = None,
        source: CollectiveGroup | WeightFiles | None = None,
        delta: Delta | None = None,
        keep_base: bool = False,
    ) -> WeightUpdate:
        """Opens an update, or finds it: the live one, or the one that serves, which has ended.

        In place, waits for the engine to pause. Reads the files, or waits for whoever does: a
        failure drops the update, and no base.

        Args:
            update_id: The trainer's name for it.
            weight_version: What the weights become.
            tensors: All of the engine's.
            lease_s: How long to wait for the trainer.
            in_place: What becomes of the sequences in flight; None: the update is staged.
            source: Where the tensors come from; None: they are pushed. A group: in place only.
            delta: Changes of what; None: all of the bytes come. Staged only, like `keep_base`.
            keep_base: Whether to hold on to the bytes, for a delta. A delta's result is held.

        Raises:
            WeightVersionBehind: The version is not newer than the one that serves.
            TensorMismatch: The tensors are not the engine's.
            UpdateInProgress: Another update is live.
            StateConflict: In place, the weights' memory is given away.
            CapabilityMissing: The engine does not know the policy.
            DeltaBaseMismatch: The base of the delta is not held.
            RolloutServerError: The files do not hold what was announced.
        """
        controller = self._controller
        check_tensors(controller.engine.info.parameters, tensors)
        if self.current.begun(update_id, weight_version) is None or controller.mixed:
            self._check(weight_version, tensors, in_place, delta)
        update = self.current.begin(
            update_id,
            weight_version,
            tensors,
            lease_s,
            in_place=in_place is not None,
            split_tensors=controller.engine.info.capabilities.split_tensors,
            source=source,
            delta=delta,
            keep_base=keep_base,
        )
        if update.state is UpdateState.COMMITTED:
            return update
        if delta is None:  # Two copies are not held.
            self._base = None
        if in_place is not None:
            if self._in_place is None or self._in_place.update is not update:
                load = partial(_load, update)
                self._in_place = InPlaceUpdate(controller, self.current, update, in_place, load)
            with update.working(self._clock):
                await self._in_place.opened()
        if isinstance(source, WeightFiles):
            reading = self._readings.get(update)
            if reading is None and update.state is UpdateState.OPEN:
                name = f"reading the files of {update_id}"
                reading = asyncio.create_task(self._read(update, source), name=name)
                self._readings[update] = reading
                reading.add_done_callback(partial(self._forget_reading, update))
            if reading is not None:
                await asyncio.shield(reading)
        return update

    def _check(
        self,
        weight_version: int,
        tensors: Sequence[TensorSpec],
        in_place: InFlightPolicy | None,
        delta: Delta | None,
    ) -> None:
        """Whether an update that is new may begin; raises as `begin`."""
        controller = self._controller
        if weight_version <= controller.weight_version:
            fix = "the trainer is behind, stop it"
            raise WeightVersionBehind(controller.weight_version, weight_version, fix)
        if in_place is not None:
            controller.check_update("BeginUpdate", in_place)
        if delta is not None:
            as_base(tensors, self._base, delta)

    async def _read(self, update: WeightUpdate, files: WeightFiles) -> None:
        """Reads the files of an update in a thread."""
        try:
            with update.working(self._clock):
                await asyncio.to_thread(
                    stage_files,
                    files,
                    update.assembler,
                    root=self._config.directory,
                    filled=_filled(update),
                    delta=update.delta,
                )
        except BaseException:
            if not update.state.ended:
                self.current.abort(update.update_id)
            raise

    def is_in_place(self, update_id: str) -> bool:
        """Whether this is the live update, and in place."""
        live = self.current.live
        return live is not None and live.update_id == update_id and live.tensor_queue is not None

    async def commit_in_place(self) -> int:
        """Ends the live update in place, or joins the end that is under way.

        Returns:
            The version that serves now.
        """
        assert self._in_place is not None
        self.current.find(self._in_place.update.update_id)
        return await self._in_place.commit()

    async def commit(self, update_id: str, policy: InFlightPolicy) -> int:
        """Switches to the weights of a staged update; joins a switch that is under way.

        Returns:
            The version that serves now.
        """
        version = self.current.committed_version(update_id)
        if version is not None:
            return version
        if self._commit is None or self._commit[1].done():
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
            UpdateUnknown: It was never begun, or it ended otherwise.
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
        """Waits for a commit, drops the update, and waits for whoever reads its files."""
        if self._commit is not None:
            await asyncio.wait({self._commit[1]})
        self.current.close()
        if self._readings:
            await asyncio.wait(self._readings.values())
        if self._in_place is not None:
            await self._in_place.ended()

    async def _switch(self, update: WeightUpdate, policy: InFlightPolicy) -> int:
        controller = self._controller
        with update.working(self._clock):  # Also while it waits for its turn.
            async with controller.control:
                controller.check_update("CommitUpdate", policy)
                update.begin_commit()
                weights = await self._decode(update)
                try:
                    engine = await controller.enter_update(policy)
                    stream = _stream(weights.named_tensors())
                    await engine.load_weights(stream, version=update.weight_version)
                except Exception as error:
                    if update.delta is not None and self._base is not None:
                        await asyncio.to_thread(self._base.undo, update.assembler)
                    update.commit_failed()
                    failure = controller.fail(error)
                    if isinstance(failure, EngineFailed):
                        self.current.close()  # It may have failed while the commit kept the update.
                    else:  # What was there is still there.
                        await controller.leave_update(mixed=controller.mixed)
                    raise failure from error
                controller.weight_version = update.weight_version
                kept = update.keep_base or update.delta is not None
                self._base = DeltaBase(update.weight_version, weights) if kept else None
                self.current.committed()
                await controller.leave_update(mixed=False)
                return update.weight_version

    async def _decode(self, update: WeightUpdate) -> Assembler:
        """The weights of an update that is complete.

        Raises:
            DeltaBaseMismatch: Its delta does not lead to what was announced; the update is
                dropped, and so is the base.
        """
        if update.delta is None:
            return update.assembler
        try:
            base = as_base(update.tensors, self._base, update.delta)
            await asyncio.to_thread(base.apply, update.delta, update.assembler)
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
        """Lets a commit that ended go: its error would hold what the engine was given."""
        if self._commit is not None and self._commit[1] is task:
            self._commit = None
        _warn(task)

    def _drop_with_engine(self, state: ServerState) -> None:
        """An update for an engine that broke, or its base, holds memory for nothing."""
        if state is ServerState.FAILED:
            self._base = None
            self.current.close()
            if self._in_place is not None:
                self._in_place.give_up()


def _warn(task: asyncio.Task[Any]) -> None:
    """Says why a task failed: whoever waited for it may have left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("%s failed: %s", task.get_name(), error)


async def _load(update: WeightUpdate, engine: Engine) -> None:
    """Has the engine overwrite its weights by what comes for a session in place."""
    version = update.weight_version
    if isinstance(update.source, CollectiveGroup):
        await engine.receive_weights(update.source, update.tensors, version=version)
        return
    assert update.tensor_queue is not None
    await engine.load_weights(update.tensor_queue.tensors(), version=version, in_place=True)


def _filled(update: WeightUpdate) -> Callable[[int], None]:
    """Tells a session from another thread which tensors are there; waits for room, in place."""
    loop = asyncio.get_running_loop()

    async def take(index: int) -> None:
        update.filled(index)
        await update.room()

    def filled(index: int) -> None:
        if update.tensor_queue is None:
            update.filled(index)
        else:
            asyncio.run_coroutine_threadsafe(take(index), loop).result()

    return filled


async def _stream(tensors: Iterator[NamedTensor]) -> AsyncIterator[NamedTensor]:
    for tensor in tensors:
        yield tensor
