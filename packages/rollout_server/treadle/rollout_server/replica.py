"""The replica: one server's engine, queue and update, as the services see them.

Invariant: what comes in is refused or runs; a call that was let in and has not started when
the server pauses or goes down is turned away, since it can still go elsewhere.

Who waits whom: `generate` waits for its place at the gate. `pause`, `resume` and the memory
calls wait for one another and for a commit (see `seat.py`); an update in place lasts from its
Begin to its Commit, and they are refused meanwhile.

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
)
from treadle.rollout_server.errors import (
    CapabilityMissing,
    ShuttingDown,
    StateConflict,
    WeightVersionBehind,
)
from treadle.rollout_server.scheduling.admission import Admission
from treadle.rollout_server.scheduling.engine_controller import EngineSeat
from treadle.rollout_server.scheduling.lifecycle import Lifecycle, ServerState
from treadle.rollout_server.updates.current_update import UpdateSlot
from treadle.rollout_server.updates.weight_updater import WeightSwitch

_TRANSIENT = frozenset({ServerState.SERVING, ServerState.UPDATING})


class Replica:
    """Starts LOADING; `serve` gives it its engine.

    Args:
        config: Bounds of admission and updates.
        clock: Times leases, retries and latency.

    Attributes:
        updates: The way in for new weights.
    """

    def __init__(self, config: ServerConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self._seat = EngineSeat(config.admission, clock)
        self.updates = WeightSwitch(self._seat, config.weights, clock)

    @property
    def lifecycle(self) -> Lifecycle:
        """Tells of every change of state."""
        return self._seat.lifecycle

    @property
    def admission(self) -> Admission:
        """Who runs and who waits."""
        return self._seat.admission

    @property
    def slot(self) -> UpdateSlot:
        """Holds the live update."""
        return self.updates.slot

    @property
    def state(self) -> ServerState:
        """What the server does now."""
        return self._seat.state

    @property
    def weight_version(self) -> int:
        """Of the weights last committed; 0 before any update."""
        return self._seat.weight_version

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine; None while it loads."""
        return self._seat.loaded_engine

    @property
    def engine(self) -> Engine:
        """The engine; see `EngineSeat.engine`."""
        return self._seat.engine

    def serve(self, engine: Engine) -> None:
        """From LOADING to SERVING."""
        self._seat.take(engine)

    async def generate(
        self, request: EngineRequest, *, min_weight_version: int = 0
    ) -> AsyncGenerator[EngineEvent, None]:
        """Runs one completion in its turn; closing the generator aborts it.

        Raises:
            RolloutServerError: It cannot run here, now, or at all.
        """
        seat = self._seat
        engine = seat.engine
        if self.state not in _TRANSIENT:
            raise seat.not_serving()
        if self.state is not ServerState.UPDATING:
            self._require_version(min_weight_version)
        async with seat.gate.place(request.priority) as place:
            self._require_version(min_weight_version)
            try:
                async with aclosing(engine.generate(request)) as events:
                    async for event in events:
                        place.started()
                        yield event
            except Exception as error:
                raise seat.fail(error) from error

    async def pause(self, policy: InFlightPolicy) -> None:
        """From SERVING to PAUSED; waits for what the policy names.

        Calls that have not started are turned away: before their first token they can go
        elsewhere. Cancelled while it waits, it leaves the server as it was.
        """
        self.updates.refuse_while_in_place("Pause")
        seat = self._seat
        async with seat.control:
            engine = seat.engine_for(policy)
            self._refuse_while_mixed("Pause")
            before = self.state
            if before is ServerState.SERVING:
                seat.lifecycle.move(ServerState.PAUSED)
            seat.gate.hold()
            seat.gate.turn_away(seat.not_serving())
            try:
                await engine.pause(policy)
            except asyncio.CancelledError:
                if before is ServerState.SERVING and self.state is ServerState.PAUSED:
                    await seat.go_on()
                raise
            except Exception as error:
                raise seat.fail(error) from error

    async def resume(self) -> None:
        """From PAUSED to SERVING. Does nothing when it serves."""
        self.updates.refuse_while_in_place("Resume")
        seat = self._seat
        async with seat.control:
            _ = seat.engine
            self._refuse_while_mixed("Resume")
            if seat.released:
                kinds = ", ".join(sorted(kind.value for kind in seat.released))
                raise StateConflict("Resume", f"without its {kinds}", "call RestoreMemory first")
            if self.state is ServerState.PAUSED:
                await seat.go_on()

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Gives device memory away; only while paused with nothing in flight."""
        self.updates.refuse_while_in_place("ReleaseMemory")
        async with self._seat.control:
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
                raise self._seat.fail(error) from error
            self._seat.released |= kinds

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Takes device memory back."""
        self.updates.refuse_while_in_place("RestoreMemory")
        async with self._seat.control:
            engine = self._memory_engine()
            try:
                await engine.restore_memory(kinds)
            except Exception as error:
                raise self._seat.fail(error) from error
            self._seat.released -= kinds

    def stop(self) -> None:
        """To STOPPING: calls that have not started are turned away, no new ones come in."""
        self._seat.lifecycle.move(ServerState.STOPPING)
        self._seat.gate.hold()
        self._seat.gate.turn_away(ShuttingDown())

    async def aclose(self) -> None:
        """Waits for a commit, drops the update, then ends the engine."""
        await self.updates.aclose()
        await self._seat.aclose()

    def _memory_engine(self) -> Engine:
        engine = self._seat.engine
        if not engine.info.capabilities.release_memory:
            raise CapabilityMissing(engine.info.name, "release_memory")
        return engine

    def _refuse_while_mixed(self, call: str) -> None:
        if self._seat.mixed:
            fix = "an update in place ended without its commit: commit another one first"
            raise StateConflict(call, self.state.value, fix)

    def _require_version(self, wanted: int) -> None:
        _ = self._seat.engine
        if self.weight_version < wanted:
            fix = "commit the newer weights first"
            raise WeightVersionBehind(self.weight_version, wanted, fix)
