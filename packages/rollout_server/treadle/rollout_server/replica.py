"""The replica: one server's engine, state, queue and update, kept consistent.

Invariant: the engine is told to pause, resume, load or release only here and by one task
at a time; the lifecycle says beforehand what the engine is about to do, and a failing
engine moves it to FAILED before anyone hears of the error.

Who waits whom: `generate` waits for its place at the gate. `pause`, `resume`, `commit` and
the memory calls wait for one another. A commit runs in a task of its own, owned here, so
that a caller who gives up leaves no half-switched engine; later callers join it.

This is the domain; `services/` translates it to gRPC and back.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing

from treadle.rollout_server.admission import Admission
from treadle.rollout_server.clock import Clock
from treadle.rollout_server.config import ServerConfig
from treadle.rollout_server.engine import (
    Engine,
    EngineEvent,
    EngineRequest,
    InFlightPolicy,
    MemoryKind,
    NamedTensor,
    TensorSpec,
)
from treadle.rollout_server.errors import (
    CapabilityMissing,
    EngineFailed,
    NotServing,
    RolloutServerError,
    ShuttingDown,
    StateConflict,
    UpdateUnknown,
    WeightVersionBehind,
)
from treadle.rollout_server.gate import AdmissionGate
from treadle.rollout_server.lifecycle import Lifecycle, ServerState
from treadle.rollout_server.tensors import check_tensors
from treadle.rollout_server.updates.files import stage_files
from treadle.rollout_server.updates.session import UpdateSession, UpdateState
from treadle.rollout_server.updates.slot import UpdateSlot

_log = logging.getLogger(__name__)
_TRANSIENT = frozenset({ServerState.SERVING, ServerState.UPDATING})


class Replica:
    """Starts LOADING; `serve` gives it its engine.

    Args:
        config: Bounds of admission and updates.
        clock: Times leases, retries and latency.
    """

    def __init__(self, config: ServerConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.lifecycle = Lifecycle()
        self.admission = Admission(
            max_in_flight=config.admission.max_in_flight, max_queued=config.admission.max_queued
        )
        self.slot = UpdateSlot(clock, max_chunk_bytes=config.weights.max_chunk_bytes)
        self._gate = AdmissionGate(self.admission, clock)
        self._engine: Engine | None = None
        self._failure: EngineFailed | None = None
        self._control = asyncio.Lock()
        self._released: frozenset[MemoryKind] = frozenset()
        self._commit: tuple[str, asyncio.Task[int]] | None = None

    @property
    def state(self) -> ServerState:
        """What the server does now."""
        return self.lifecycle.state

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine; None while it loads."""
        return self._engine

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            NotServing: It is still loading.
            EngineFailed: It broke.
            ShuttingDown: The server is going away.
        """
        if self._failure is not None:
            raise self._failure
        if self.state is ServerState.STOPPING:
            raise ShuttingDown
        if self._engine is None:
            raise NotServing(self.state.value, self.admission.retry_after_s())
        return self._engine

    def serve(self, engine: Engine) -> None:
        """From LOADING to SERVING."""
        self._engine = engine
        self.lifecycle.move(ServerState.SERVING)

    async def generate(
        self, request: EngineRequest, *, min_weight_version: int = 0
    ) -> AsyncGenerator[EngineEvent, None]:
        """Runs one completion in its turn; closing the generator aborts it.

        Raises:
            RolloutServerError: It cannot run here, now, or at all.
        """
        engine = self.engine
        if self.state not in _TRANSIENT:
            raise NotServing(self.state.value, self.admission.retry_after_s())
        if self.state is not ServerState.UPDATING:
            self._require_version(min_weight_version)
        async with self._gate.place(request.priority):
            self._require_version(min_weight_version)
            try:
                async with aclosing(engine.generate(request)) as events:
                    async for event in events:
                        yield event
            except Exception as error:
                raise self._fail(error) from error

    async def pause(self, policy: InFlightPolicy) -> None:
        """From SERVING to PAUSED; waits for what the policy names.

        Queued calls are turned away: before their first token they can go elsewhere.
        Cancelled while it waits, it leaves the server as it was.
        """
        async with self._control:
            engine = self._engine_for(policy)
            before = self.state
            if before is ServerState.SERVING:
                self.lifecycle.move(ServerState.PAUSED)
            self._gate.hold()
            self._gate.turn_away(NotServing("paused", self.admission.retry_after_s()))
            try:
                await engine.pause(policy)
            except asyncio.CancelledError:
                if before is ServerState.SERVING and self.state is ServerState.PAUSED:
                    await self._go_on(engine)
                raise
            except Exception as error:
                raise self._fail(error) from error

    async def resume(self) -> None:
        """From PAUSED to SERVING. Does nothing when it serves."""
        async with self._control:
            engine = self.engine
            if self._released:
                kinds = ", ".join(sorted(kind.value for kind in self._released))
                raise StateConflict("Resume", f"without its {kinds}", "call RestoreMemory first")
            if self.state is ServerState.PAUSED:
                await self._go_on(engine)

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Gives device memory away; only while paused with nothing in flight."""
        async with self._control:
            engine = self.engine
            if not engine.info.capabilities.release_memory:
                raise CapabilityMissing(engine.info.name, "release_memory")
            if self.state is not ServerState.PAUSED:
                raise StateConflict("ReleaseMemory", self.state.value, "call Pause first")
            running = engine.counters.running
            if running:
                fix = f"{running} sequences are kept: Pause with DRAIN or INTERRUPT first"
                raise StateConflict("ReleaseMemory", self.state.value, fix)
            try:
                await engine.release_memory(kinds)
            except Exception as error:
                raise self._fail(error) from error
            self._released |= kinds

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Takes device memory back."""
        async with self._control:
            engine = self.engine
            if not engine.info.capabilities.release_memory:
                raise CapabilityMissing(engine.info.name, "release_memory")
            try:
                await engine.restore_memory(kinds)
            except Exception as error:
                raise self._fail(error) from error
            self._released -= kinds

    def begin_update(
        self, update_id: str, weight_version: int, tensors: Sequence[TensorSpec], lease_s: float
    ) -> UpdateSession:
        """Opens an update, or finds it.

        Raises:
            WeightVersionBehind: The version is not newer than the one that serves.
            TensorMismatch: The tensors are not the engine's.
            UpdateInProgress: Another update is live.
        """
        engine = self.engine
        if weight_version <= engine.weight_version:
            fix = "the trainer is behind, stop it"
            raise WeightVersionBehind(engine.weight_version, weight_version, fix)
        check_tensors(engine.info.parameters, tensors)
        return self.slot.begin(update_id, weight_version, tensors, lease_s)

    async def stage_files(
        self, session: UpdateSession, directory: str, crc32: Sequence[int]
    ) -> None:
        """Reads the files of an update in a thread. A failure drops the update.

        Does nothing when they were read before, as when Begin is repeated.
        """
        root = self.config.weights.directory
        assembler = session.assembler
        if session.state is not UpdateState.OPEN:
            return
        try:
            with session.working(self.clock):
                await asyncio.to_thread(stage_files, directory, crc32, assembler, root=root)
        except BaseException:
            if not session.state.ended:
                self.slot.abort(session.update_id)
            raise

    async def commit(self, update_id: str, policy: InFlightPolicy) -> int:
        """Switches to the weights of an update; joins a switch that is under way.

        Returns:
            The version that serves now.
        """
        version = self.slot.committed_version(update_id)
        if version is not None:
            return version
        if self._commit is None or self._commit[1].done():
            self.slot.find(update_id)
            self._engine_for(policy)
            task = asyncio.create_task(self._switch(update_id, policy), name=f"commit {update_id}")
            task.add_done_callback(_log_failure)
            self._commit = (update_id, task)
        elif self._commit[0] != update_id:
            raise UpdateUnknown(update_id, "is not the update that is being committed")
        return await asyncio.shield(self._commit[1])

    def abort_update(self, update_id: str) -> None:
        """Drops an update, unless it is being committed."""
        if self._commit is not None and not self._commit[1].done():
            fix = "a commit runs to its end; call CommitUpdate to learn it"
            raise StateConflict("AbortUpdate", self.state.value, fix)
        self.slot.abort(update_id)

    def stop(self) -> None:
        """To STOPPING: queued calls are turned away and no new ones come in."""
        self.lifecycle.move(ServerState.STOPPING)
        self._gate.hold()
        self._gate.turn_away(ShuttingDown())

    async def aclose(self) -> None:
        """Waits for a commit, then ends the engine and drops the update."""
        if self._commit is not None:
            await asyncio.wait({self._commit[1]})
        self.slot.close()
        if self._engine is not None:
            await self._engine.aclose()

    async def _switch(self, update_id: str, policy: InFlightPolicy) -> int:
        async with self._control:
            session = self.slot.find(update_id)
            engine = self.engine
            if self._released:
                raise StateConflict("CommitUpdate", "without its memory", "call RestoreMemory")
            before = self.state
            tensors = session.begin_commit()
            with session.working(self.clock):
                self.lifecycle.move(ServerState.UPDATING)
                self._gate.hold()
                try:
                    await engine.pause(policy)
                    await engine.load_weights(_stream(tensors), version=session.weight_version)
                except Exception as error:
                    session.commit_failed()
                    failure = self._fail(error)
                    if failure is not self._failure:  # A refusal: the old weights are whole.
                        await self._return_to(before, engine)
                    raise failure from error
            self.slot.committed()
            await self._return_to(before, engine)
            return session.weight_version

    async def _return_to(self, before: ServerState, engine: Engine) -> None:
        """Ends UPDATING, unless a shutdown came in between."""
        if self.state is not ServerState.UPDATING:
            await engine.resume()
        elif before is ServerState.PAUSED:
            self.lifecycle.move(before)
            self._gate.turn_away(NotServing("paused", self.admission.retry_after_s()))
        else:
            await self._go_on(engine)

    async def _go_on(self, engine: Engine) -> None:
        try:
            await engine.resume()
        except Exception as error:
            raise self._fail(error) from error
        if self.state in (ServerState.PAUSED, ServerState.UPDATING):
            self.lifecycle.move(ServerState.SERVING)
            self._gate.release()
        # Else a shutdown or a failure came meanwhile, and nothing may come in.

    def _engine_for(self, policy: InFlightPolicy) -> Engine:
        engine = self.engine
        wanted = policy is InFlightPolicy.CONTINUE
        if wanted and not engine.info.capabilities.in_flight_continue:
            raise CapabilityMissing(engine.info.name, "in_flight_continue")
        return engine

    def _require_version(self, wanted: int) -> None:
        serving = self.engine.weight_version
        if serving < wanted:
            raise WeightVersionBehind(serving, wanted, "commit the newer weights first")

    def _fail(self, error: Exception) -> RolloutServerError:
        """To FAILED, unless the error is one that an engine may raise."""
        if isinstance(error, RolloutServerError) and not isinstance(error, EngineFailed):
            return error
        assert self._engine is not None
        if self._failure is None:
            name = self._engine.info.name
            self._failure = error if isinstance(error, EngineFailed) else EngineFailed(name, error)
            _log.error("%s", self._failure, exc_info=error)
            if self.state is not ServerState.STOPPING:
                self.lifecycle.move(ServerState.FAILED)
            self._gate.hold()
            self._gate.turn_away(self._failure)
        return self._failure


async def _stream(tensors: Iterator[NamedTensor]) -> AsyncIterator[NamedTensor]:
    for tensor in tensors:
        yield tensor


def _log_failure(task: asyncio.Task[int]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("%s failed: %s", task.get_name(), error)
