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
from treadle.rollout_server.scheduling.engine_controller import EngineSeat
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.tensors import check_tensors
from treadle.rollout_server.updates.assemble import Assembler
from treadle.rollout_server.updates.current_update import UpdateSlot
from treadle.rollout_server.updates.delta import Delta, DeltaBase, as_base
from treadle.rollout_server.updates.files import WeightFiles, stage_files
from treadle.rollout_server.updates.in_place import InPlaceUpdate
from treadle.rollout_server.updates.weight_update import UpdateSession, UpdateState

_log = logging.getLogger(__name__)


class WeightSwitch:
    """See the module docstring.

    Args:
        seat: Of the engine.
        config: Bounds of updates.
        clock: Times leases.
    """

    def __init__(self, seat: EngineSeat, config: WeightsConfig, clock: Clock) -> None:
        self.slot = UpdateSlot(clock, max_chunk_bytes=config.max_chunk_bytes)
        self._seat = seat
        self._config = config
        self._clock = clock
        self._commit: tuple[str, asyncio.Task[int]] | None = None
        self._in_place: InPlaceUpdate | None = None
        self._readings: dict[UpdateSession, asyncio.Task[None]] = {}
        self._base: DeltaBase | None = None
        seat.lifecycle.observe(self._drop_with_engine)

    def refuse_while_in_place(self, call: str) -> None:
        """Raises `StateConflict` while an update holds the engine."""
        update = self._in_place
        if update is not None and not update.done:
            name = update.session.update_id
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
    ) -> UpdateSession:
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
        seat = self._seat
        check_tensors(seat.engine.info.parameters, tensors)
        if self.slot.begun(update_id, weight_version) is None or seat.mixed:
            self._check(weight_version, tensors, in_place, delta)
        session = self.slot.begin(
            update_id,
            weight_version,
            tensors,
            lease_s,
            in_place=in_place is not None,
            split_tensors=seat.engine.info.capabilities.split_tensors,
            source=source,
            delta=delta,
            keep_base=keep_base,
        )
        if session.state is UpdateState.COMMITTED:
            return session
        if delta is None:  # Two copies are not held.
            self._base = None
        if in_place is not None:
            if self._in_place is None or self._in_place.session is not session:
                load = partial(_load, session)
                self._in_place = InPlaceUpdate(seat, self.slot, session, in_place, load)
            with session.working(self._clock):
                await self._in_place.opened()
        if isinstance(source, WeightFiles):
            reading = self._readings.get(session)
            if reading is None and session.state is UpdateState.OPEN:
                name = f"reading the files of {update_id}"
                reading = asyncio.create_task(self._read(session, source), name=name)
                self._readings[session] = reading
                reading.add_done_callback(partial(self._forget_reading, session))
            if reading is not None:
                await asyncio.shield(reading)
        return session

    def _check(
        self,
        weight_version: int,
        tensors: Sequence[TensorSpec],
        in_place: InFlightPolicy | None,
        delta: Delta | None,
    ) -> None:
        """Whether an update that is new may begin; raises as `begin`."""
        seat = self._seat
        if weight_version <= seat.weight_version:
            fix = "the trainer is behind, stop it"
            raise WeightVersionBehind(seat.weight_version, weight_version, fix)
        if in_place is not None:
            seat.check_update("BeginUpdate", in_place)
        if delta is not None:
            as_base(tensors, self._base, delta)

    async def _read(self, session: UpdateSession, files: WeightFiles) -> None:
        """Reads the files of an update in a thread."""
        try:
            with session.working(self._clock):
                await asyncio.to_thread(
                    stage_files,
                    files,
                    session.assembler,
                    root=self._config.directory,
                    filled=_filled(session),
                    delta=session.delta,
                )
        except BaseException:
            if not session.state.ended:
                self.slot.abort(session.update_id)
            raise

    def is_in_place(self, update_id: str) -> bool:
        """Whether this is the live update, and in place."""
        live = self.slot.session
        return live is not None and live.update_id == update_id and live.hand_over is not None

    async def commit_in_place(self) -> int:
        """Ends the live update in place, or joins the end that is under way.

        Returns:
            The version that serves now.
        """
        assert self._in_place is not None
        self.slot.find(self._in_place.session.update_id)
        return await self._in_place.commit()

    async def commit(self, update_id: str, policy: InFlightPolicy) -> int:
        """Switches to the weights of a staged update; joins a switch that is under way.

        Returns:
            The version that serves now.
        """
        version = self.slot.committed_version(update_id)
        if version is not None:
            return version
        if self._commit is None or self._commit[1].done():
            session = self.slot.find(update_id)
            self._seat.engine_for(policy)
            task = asyncio.create_task(self._switch(session, policy), name=f"commit {update_id}")
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
        live = self.slot.session
        committing = self._commit is not None and self._commit[0] == update_id
        if live is not None and live.update_id == update_id:
            committing |= live.state is UpdateState.COMMITTING
        if committing or self.slot.committed_version(update_id) is not None:
            fix = f"the commit of {update_id!r} runs to its end; call CommitUpdate to learn it"
            raise StateConflict("AbortUpdate", self._seat.state.value, fix)
        self.slot.abort(update_id)
        if self._in_place is not None and self._in_place.session.update_id == update_id:
            await self._in_place.ended()

    async def aclose(self) -> None:
        """Waits for a commit, drops the update, and waits for whoever reads its files."""
        if self._commit is not None:
            await asyncio.wait({self._commit[1]})
        self.slot.close()
        if self._readings:
            await asyncio.wait(self._readings.values())
        if self._in_place is not None:
            await self._in_place.ended()

    async def _switch(self, session: UpdateSession, policy: InFlightPolicy) -> int:
        seat = self._seat
        with session.working(self._clock):  # Also while it waits for its turn.
            async with seat.control:
                seat.check_update("CommitUpdate", policy)
                session.begin_commit()
                weights = await self._decode(session)
                try:
                    engine = await seat.enter_update(policy)
                    stream = _stream(weights.named_tensors())
                    await engine.load_weights(stream, version=session.weight_version)
                except Exception as error:
                    if session.delta is not None and self._base is not None:
                        await asyncio.to_thread(self._base.undo, session.assembler)
                    session.commit_failed()
                    failure = seat.fail(error)
                    if isinstance(failure, EngineFailed):
                        self.slot.close()  # It may have failed while the commit kept the update.
                    else:  # What was there is still there.
                        await seat.leave_update(mixed=seat.mixed)
                    raise failure from error
                seat.weight_version = session.weight_version
                kept = session.keep_base or session.delta is not None
                self._base = DeltaBase(session.weight_version, weights) if kept else None
                self.slot.committed()
                await seat.leave_update(mixed=False)
                return session.weight_version

    async def _decode(self, session: UpdateSession) -> Assembler:
        """The weights of an update that is complete.

        Raises:
            DeltaBaseMismatch: Its delta does not lead to what was announced; the update is
                dropped, and so is the base.
        """
        if session.delta is None:
            return session.assembler
        try:
            base = as_base(session.tensors, self._base, session.delta)
            await asyncio.to_thread(base.apply, session.delta, session.assembler)
        except Exception:
            self._base = None
            session.commit_failed()
            self.slot.abort(session.update_id)
            raise
        return base.weights

    def _forget_reading(self, session: UpdateSession, task: asyncio.Task[None]) -> None:
        del self._readings[session]
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
            self.slot.close()
            if self._in_place is not None:
                self._in_place.give_up()


def _warn(task: asyncio.Task[Any]) -> None:
    """Says why a task failed: whoever waited for it may have left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("%s failed: %s", task.get_name(), error)


async def _load(session: UpdateSession, engine: Engine) -> None:
    """Has the engine overwrite its weights by what comes for a session in place."""
    version = session.weight_version
    if isinstance(session.source, CollectiveGroup):
        await engine.receive_weights(session.source, session.tensors, version=version)
        return
    assert session.hand_over is not None
    await engine.load_weights(session.hand_over.tensors(), version=version, in_place=True)


def _filled(session: UpdateSession) -> Callable[[int], None]:
    """Tells a session from another thread which tensors are there; waits for room, in place."""
    loop = asyncio.get_running_loop()

    async def take(index: int) -> None:
        session.filled(index)
        await session.room()

    def filled(index: int) -> None:
        if session.hand_over is None:
            session.filled(index)
        else:
            asyncio.run_coroutine_threadsafe(take(index), loop).result()

    return filled


async def _stream(tensors: Iterator[NamedTensor]) -> AsyncIterator[NamedTensor]:
    for tensor in tensors:
        yield tensor
