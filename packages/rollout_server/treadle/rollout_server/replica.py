"""The replica: one server's engine, request queue and update, as the services see them.

Invariant: a call is refused or it runs. A call that was admitted and has not started when the
server pauses or stops is rejected, since it can still run on another replica.

Who waits for whom: `generate` waits for a slot of the request queue. `pause`, `resume` and the
memory calls wait for one another and for a commit (see `engine_controller.py`). An update in
place lasts from its Begin to its Commit; these calls are refused meanwhile.

This is the domain; `services/` translates it to gRPC and back.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    Engine,
    EngineEvent,
    EngineRequest,
    InFlightPolicy,
    MemoryKind,
    Tokens,
)
from treadle.rollout_server.errors import (
    CapabilityMissing,
    ShuttingDown,
    StateConflict,
    WeightVersionBehind,
)
from treadle.rollout_server.scheduling.admission import Admission
from treadle.rollout_server.scheduling.engine_controller import EngineController
from treadle.rollout_server.scheduling.lifecycle import Lifecycle, ServerState
from treadle.rollout_server.scheduling.pauses import Pauses
from treadle.rollout_server.scheduling.time_use import TimeUse
from treadle.rollout_server.updates.weight_update import CurrentUpdate
from treadle.rollout_server.updates.weight_updater import WeightUpdater

_TRANSIENT = frozenset({ServerState.SERVING, ServerState.UPDATING})


class Replica:
    """Starts LOADING; `serve` gives it its engine.

    Args:
        config: Bounds of admission and updates.
        clock: Times leases, retries and latency.

    Attributes:
        config: Bounds of admission and updates.
        clock: Times leases, retries and latency.
        time_use: Seconds since the start, by cause.
    """

    def __init__(self, config: ServerConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self._controller = EngineController(config.admission, clock)
        self.updates = WeightUpdater(self._controller, config.weights, clock)
        self.time_use = TimeUse(clock.time, slots=config.model.max_num_seqs)
        self.lifecycle.observe(self.time_use.entered)

    @property
    def lifecycle(self) -> Lifecycle:
        """Announces every change of state."""
        return self._controller.lifecycle

    @property
    def admission(self) -> Admission:
        """Number of calls that run and that wait."""
        return self._controller.admission

    @property
    def pauses(self) -> Pauses:
        """When running sequences were kept without sampling."""
        return self._controller.pauses

    @property
    def current_update(self) -> CurrentUpdate:
        """The transaction of the live update."""
        return self.updates.current

    @property
    def state(self) -> ServerState:
        """The state of the server now."""
        return self._controller.state

    @property
    def weight_version(self) -> int:
        """Version last committed; 0 before any update."""
        return self._controller.weight_version

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine; None while it loads."""
        return self._controller.loaded_engine

    @property
    def engine(self) -> Engine:
        """The engine; see `EngineController.engine`."""
        return self._controller.engine

    def serve(self, engine: Engine) -> None:
        """Moves from LOADING to SERVING with a loaded engine."""
        self._controller.take(engine)

    async def generate(
        self, request: EngineRequest, *, min_weight_version: int = 0
    ) -> AsyncGenerator[EngineEvent, None]:
        """Runs one completion when a slot is free; closing the generator aborts it.

        Raises:
            RolloutServerError: It cannot run here, now, or at all.
        """
        controller = self._controller
        engine = controller.engine
        if self.state not in _TRANSIENT:
            raise controller.not_serving()
        if self.state is not ServerState.UPDATING:
            self._require_version(min_weight_version)
        async with controller.queue.slot(request.priority) as slot:
            self._require_version(min_weight_version)
            try:
                with self.time_use.sequence() as sequence:
                    async with aclosing(engine.generate(request)) as events:
                        async for event in events:
                            slot.started()
                            if isinstance(event, Tokens):
                                sequence.sampled()
                            yield event
            except Exception as error:
                raise controller.fail(error) from error

    async def pause(self, policy: InFlightPolicy) -> None:
        """Moves from SERVING to PAUSED; waits for the sequences that the policy names.

        Calls that have not started are rejected: they can still go elsewhere. A pause that is
        cancelled while it waits leaves the server as it was.

        Raises:
            RolloutServerError: The state or an update does not allow it, or the engine failed.
        """
        self.updates.refuse_while_in_place("Pause")
        controller = self._controller
        async with controller.control:
            engine = controller.engine_for(policy)
            self._refuse_while_mixed("Pause")
            before = self.state
            if before is ServerState.SERVING:
                controller.lifecycle.move(ServerState.PAUSED)
            controller.queue.pause_admission()
            controller.queue.reject_waiting(controller.not_serving())
            try:
                await controller.pause(engine, policy)
            except asyncio.CancelledError:
                if before is ServerState.SERVING and self.state is ServerState.PAUSED:
                    await controller.resume()
                raise
            except Exception as error:
                raise controller.fail(error) from error

    async def resume(self) -> None:
        """Moves from PAUSED to SERVING. Does nothing when it serves.

        Raises:
            StateConflict: Memory is released, the weights are a mixture, or an update is in place.
            RolloutServerError: The engine failed.
        """
        self.updates.refuse_while_in_place("Resume")
        controller = self._controller
        async with controller.control:
            _ = controller.engine
            self._refuse_while_mixed("Resume")
            if controller.released:
                kinds = ", ".join(sorted(kind.value for kind in controller.released))
                raise StateConflict("Resume", f"without its {kinds}", "call RestoreMemory first")
            if self.state is ServerState.PAUSED:
                await controller.resume()

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Releases device memory; only while paused with nothing in flight.

        Raises:
            StateConflict: The server is not paused, or keeps sequences.
            RolloutServerError: The engine cannot do it, or failed.
        """
        self.updates.refuse_while_in_place("ReleaseMemory")
        async with self._controller.control:
            engine = self._memory_engine()
            if self.state is not ServerState.PAUSED:
                raise StateConflict("ReleaseMemory", self.state.value, "call Pause first")
            running = engine.counters.running
            if running:
                fix = f"{running} sequences are kept: Pause with DRAIN or INTERRUPT first"
                raise StateConflict("ReleaseMemory", self.state.value, fix)
            try:
                await engine.release_memory(kinds)
            except Exception as error:
                raise self._controller.fail(error) from error
            self._controller.released |= kinds
            self.time_use.released(True)

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Takes device memory back.

        Raises:
            RolloutServerError: The engine cannot do it, or failed.
        """
        self.updates.refuse_while_in_place("RestoreMemory")
        async with self._controller.control:
            engine = self._memory_engine()
            try:
                await engine.restore_memory(kinds)
            except Exception as error:
                raise self._controller.fail(error) from error
            self._controller.released -= kinds
            self.time_use.released(bool(self._controller.released))

    def stop(self) -> None:
        """Moves to STOPPING: rejects calls that have not started and admits no new ones."""
        self._controller.lifecycle.move(ServerState.STOPPING)
        self._controller.queue.pause_admission()
        self._controller.queue.reject_waiting(ShuttingDown())

    async def aclose(self) -> None:
        """Waits for a commit, drops the live update, then closes the engine."""
        await self.updates.aclose()
        await self._controller.aclose()

    def _memory_engine(self) -> Engine:
        engine = self._controller.engine
        if not engine.info.capabilities.release_memory:
            raise CapabilityMissing(engine.info.name, "release_memory")
        return engine

    def _refuse_while_mixed(self, call: str) -> None:
        if self._controller.mixed:
            fix = "an update in place ended without its commit: commit another one first"
            raise StateConflict(call, self.state.value, fix)

    def _require_version(self, wanted: int) -> None:
        _ = self._controller.engine
        if self.weight_version < wanted:
            fix = "commit the newer weights first"
            raise WeightVersionBehind(self.weight_version, wanted, fix)
