"""The engine controller: one server's engine, its state, and which calls it admits.

Invariant: only the holder of `control` pauses, resumes, loads or releases the engine. The state
leaves SERVING before the engine pauses and returns only after it resumes; a failure of the engine
moves it to FAILED before any caller gets the error. While the weights are a mixture (an update in
place ended without its commit), the state is LOADING or UPDATING and the engine is paused.

Who waits: `enter_update` for the sequences that its policy names, and a task owned here for the
engine's own failure, which rejects every queued call.
"""

import asyncio
import logging
from contextlib import suppress

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.config.schema import AdmissionConfig
from treadle.rollout_server.engine import Engine, InFlightPolicy, MemoryKind
from treadle.rollout_server.errors import (
    CapabilityMissing,
    EngineFailed,
    NotServing,
    RolloutServerError,
    ShuttingDown,
    StateConflict,
)
from treadle.rollout_server.scheduling.admission import Admission
from treadle.rollout_server.scheduling.lifecycle import Lifecycle, ServerState
from treadle.rollout_server.scheduling.pauses import Pauses
from treadle.rollout_server.scheduling.request_queue import RequestQueue

_log = logging.getLogger(__name__)
_MIXED = "loading: an update in place ended without its commit, another one must commit"


class EngineController:
    """Starts LOADING, without an engine.

    Attributes:
        lifecycle: The state of the server now.
        admission: Number of calls that run and that wait.
        queue: Where calls wait for the engine.
        control: Lock held for each command to the engine.
        pauses: When the engine kept running sequences without sampling.
        released: Device memory that the engine has released.
        weight_version: Version last committed; 0 before any update.
        mixed: Whether the engine holds tensors of more than one version.
        loaded_engine: The engine; None while it loads.
        failure: How the engine broke; None while it has not.
    """

    def __init__(self, config: AdmissionConfig, clock: Clock) -> None:
        self.lifecycle = Lifecycle()
        self.admission = Admission(max_in_flight=config.max_in_flight, max_queued=config.max_queued)
        self.queue = RequestQueue(self.admission, clock)
        self.control = asyncio.Lock()
        self.pauses = Pauses(clock)
        self.released: frozenset[MemoryKind] = frozenset()
        self.weight_version = 0
        self.mixed = False
        self.loaded_engine: Engine | None = None
        self.failure: EngineFailed | None = None
        self._watch: asyncio.Task[None] | None = None
        self._home = ServerState.SERVING  # the state after an update that is whole

    @property
    def state(self) -> ServerState:
        """The state of the server now."""
        return self.lifecycle.state

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            NotServing: It is still loading.
            EngineFailed: It broke.
            ShuttingDown: The server is shutting down.
        """
        if self.failure is not None:
            # Without its traceback: every call would add its frames to this one error.
            raise self.failure.with_traceback(None)
        if self.state is ServerState.STOPPING:
            raise ShuttingDown
        if self.loaded_engine is None:
            raise self.not_serving()
        return self.loaded_engine

    def engine_for(self, policy: InFlightPolicy) -> Engine:
        """Returns the engine, if it supports the policy.

        Raises:
            CapabilityMissing: It does not.
        """
        engine = self.engine
        wanted = policy is InFlightPolicy.CONTINUE
        if wanted and not engine.info.capabilities.in_flight_continue:
            raise CapabilityMissing(engine.info.name, "in_flight_continue")
        return engine

    def not_serving(self) -> NotServing:
        """Returns the error with the state in which no call is admitted, and when to try again."""
        state = _MIXED if self.mixed else self.state.value
        return NotServing(state, self.admission.retry_after_s())

    def take(self, engine: Engine) -> None:
        """Moves from LOADING to SERVING with a loaded engine."""
        self.loaded_engine = engine
        self.weight_version = engine.weight_version
        self._watch = asyncio.create_task(self._wait_failed(engine), name="engine failure")
        self.lifecycle.move(ServerState.SERVING)

    async def resume(self) -> None:
        """Resumes the engine and moves to SERVING."""
        engine = self.engine
        try:
            await engine.resume()
        except Exception as error:
            raise self.fail(error) from error
        self.pauses.end()
        if self.state in (ServerState.PAUSED, ServerState.UPDATING):
            self.lifecycle.move(ServerState.SERVING)
            self.queue.resume_admission()
        # Else the server shut down or failed meanwhile and admits nothing.

    def check_update(self, call: str, policy: InFlightPolicy) -> None:
        """Checks that weights can be written now.

        Raises:
            StateConflict: Their memory is released.
            RolloutServerError: There is no engine, or it does not support the policy.
        """
        self.engine_for(policy)
        if MemoryKind.WEIGHTS in self.released:
            raise StateConflict(call, "without its weights", "call RestoreMemory first")

    async def pause(self, engine: Engine, policy: InFlightPolicy) -> None:
        """Pauses the engine; see `Engine.pause`."""
        if policy is not InFlightPolicy.CONTINUE:
            self.pauses.end()  # What an earlier pause had kept runs to its end, or ends now.
        await engine.pause(policy)
        if policy is InFlightPolicy.CONTINUE:
            self.pauses.begin()

    async def enter_update(self, policy: InFlightPolicy) -> Engine:
        """Moves to UPDATING: calls queue and the engine is paused. `leave_update` ends it."""
        engine = self.engine
        if self.state is not ServerState.LOADING:
            self._home = self.state
        self.lifecycle.move(ServerState.UPDATING)
        self.queue.pause_admission()
        await self.pause(engine, policy)
        return engine

    async def leave_update(self, *, mixed: bool) -> None:
        """Ends UPDATING; the server may have shut down or failed meanwhile.

        Changes nothing where the update ended before it was entered.

        Args:
            mixed: Whether the engine now holds tensors of more than one version.
        """
        self.mixed = mixed
        if self.state is ServerState.FAILED:
            return
        if mixed:
            await self._stay_down()
        elif self.state is ServerState.STOPPING:
            assert self.loaded_engine is not None
            if not self.released:  # Else no sequence is kept that could finish.
                await self.loaded_engine.resume()
                self.pauses.end()
        elif self.state is not ServerState.UPDATING:
            return
        elif self._home is ServerState.PAUSED:
            self.lifecycle.move(ServerState.PAUSED)
            self.queue.reject_waiting(self.not_serving())
        else:
            await self.resume()

    def fail(self, error: Exception) -> RolloutServerError:
        """Moves to FAILED, unless an engine may raise the error; returns what callers get."""
        if isinstance(error, RolloutServerError) and not isinstance(error, EngineFailed):
            return error
        return self._broken(error)

    async def aclose(self) -> None:
        """Stops watching the engine, then closes it."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        if self.loaded_engine is not None:
            await self.loaded_engine.aclose()

    async def _stay_down(self) -> None:
        """Moves to LOADING and ends the kept sequences, so that their clients go elsewhere."""
        assert self.loaded_engine is not None
        if self.state is ServerState.UPDATING:
            self.lifecycle.move(ServerState.LOADING)
            self.queue.reject_waiting(self.not_serving())
        try:
            await self.pause(self.loaded_engine, InFlightPolicy.INTERRUPT)
        except Exception as error:
            self.fail(error)

    async def _wait_failed(self, engine: Engine) -> None:
        self._broken(await engine.wait_failed())

    def _broken(self, error: Exception) -> EngineFailed:
        assert self.loaded_engine is not None
        if self.failure is None:
            name = self.loaded_engine.info.name
            self.failure = error if isinstance(error, EngineFailed) else EngineFailed(name, error)
            _log.error("%s", self.failure, exc_info=error)
            if self.state is not ServerState.STOPPING:
                self.lifecycle.move(ServerState.FAILED)
            self.queue.pause_admission()
            self.queue.reject_waiting(self.failure)
        return self.failure
