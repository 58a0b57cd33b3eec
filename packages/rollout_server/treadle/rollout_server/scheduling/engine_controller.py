"""The engine controller: one server's engine, what it was last told, and who may come in.

Invariant: the engine is told to pause, resume, load or release only by the holder of
`control`; the lifecycle says beforehand what the engine is about to do, and a failing engine
moves it to FAILED before anyone hears of the error. While the weights are a mixture (an update
in place ended without its commit) the state is LOADING or UPDATING and the engine is paused.

Who waits: `enter_update` for the sequences that its policy names. Who wakes whom: the engine's
own failure, which a task owned here waits for, turns every queued call away.
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
from treadle.rollout_server.scheduling.request_queue import RequestQueue

_log = logging.getLogger(__name__)
_MIXED = "loading: an update in place ended without its commit, another one must commit"


class EngineController:
    """Starts LOADING, without an engine.

    Args:
        config: Bounds of admission.
        clock: Times retries and latency.

    Attributes:
        control: Held by whoever tells the engine what to do.
        released: Device memory that the engine has given away.
        weight_version: Of the weights last committed; 0 before any update.
        mixed: Whether the engine holds tensors of more than one version.
    """

    def __init__(self, config: AdmissionConfig, clock: Clock) -> None:
        self.lifecycle = Lifecycle()
        self.admission = Admission(max_in_flight=config.max_in_flight, max_queued=config.max_queued)
        self.queue = RequestQueue(self.admission, clock)
        self.control = asyncio.Lock()
        self.released: frozenset[MemoryKind] = frozenset()
        self.weight_version = 0
        self.mixed = False
        self.loaded_engine: Engine | None = None
        self.failure: EngineFailed | None = None
        self._watch: asyncio.Task[None] | None = None
        self._home = ServerState.SERVING  # where an update that is whole leads to

    @property
    def state(self) -> ServerState:
        """What the server does now."""
        return self.lifecycle.state

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            NotServing: It is still loading.
            EngineFailed: It broke.
            ShuttingDown: The server is going away.
        """
        if self.failure is not None:
            # Else every call would leave its frames in the one error.
            raise self.failure.with_traceback(None)
        if self.state is ServerState.STOPPING:
            raise ShuttingDown
        if self.loaded_engine is None:
            raise self.not_serving()
        return self.loaded_engine

    def engine_for(self, policy: InFlightPolicy) -> Engine:
        """The engine, if it knows the policy.

        Raises:
            CapabilityMissing: It does not.
        """
        engine = self.engine
        wanted = policy is InFlightPolicy.CONTINUE
        if wanted and not engine.info.capabilities.in_flight_continue:
            raise CapabilityMissing(engine.info.name, "in_flight_continue")
        return engine

    def not_serving(self) -> NotServing:
        """Why no call comes in now, and when to try again."""
        state = _MIXED if self.mixed else self.state.value
        return NotServing(state, self.admission.retry_after_s())

    def take(self, engine: Engine) -> None:
        """From LOADING to SERVING."""
        self.loaded_engine = engine
        self.weight_version = engine.weight_version
        self._watch = asyncio.create_task(self._wait_failed(engine), name="engine failure")
        self.lifecycle.move(ServerState.SERVING)

    async def go_on(self) -> None:
        """Resumes the engine, and serves."""
        engine = self.engine
        try:
            await engine.resume()
        except Exception as error:
            raise self.fail(error) from error
        if self.state in (ServerState.PAUSED, ServerState.UPDATING):
            self.lifecycle.move(ServerState.SERVING)
            self.queue.resume_admission()
        # Else a shutdown or a failure came meanwhile, and nothing may come in.

    def check_update(self, call: str, policy: InFlightPolicy) -> None:
        """Whether weights can be written now.

        Raises:
            StateConflict: Their memory is given away.
            RolloutServerError: There is no engine for it.
        """
        self.engine_for(policy)
        if MemoryKind.WEIGHTS in self.released:
            raise StateConflict(call, "without its weights", "call RestoreMemory first")

    async def enter_update(self, policy: InFlightPolicy) -> Engine:
        """To UPDATING: calls queue, and the engine stands still. `leave_update` ends it."""
        engine = self.engine
        if self.state is not ServerState.LOADING:
            self._home = self.state
        self.lifecycle.move(ServerState.UPDATING)
        self.queue.pause_admission()
        await engine.pause(policy)
        return engine

    async def leave_update(self, *, mixed: bool) -> None:
        """Ends UPDATING; a shutdown or a failure may have come in between.

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
            if not self.released:  # else nothing is kept that could come to its end
                await self.loaded_engine.resume()
        elif self.state is not ServerState.UPDATING:
            return
        elif self._home is ServerState.PAUSED:
            self.lifecycle.move(ServerState.PAUSED)
            self.queue.reject_waiting(self.not_serving())
        else:
            await self.go_on()

    def fail(self, error: Exception) -> RolloutServerError:
        """To FAILED, unless the error is one that an engine may raise."""
        if isinstance(error, RolloutServerError) and not isinstance(error, EngineFailed):
            return error
        return self._broken(error)

    async def aclose(self) -> None:
        """Ends the watch, then the engine."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        if self.loaded_engine is not None:
            await self.loaded_engine.aclose()

    async def _stay_down(self) -> None:
        """To LOADING; the sequences that were kept end, so that their clients go elsewhere."""
        assert self.loaded_engine is not None
        if self.state is ServerState.UPDATING:
            self.lifecycle.move(ServerState.LOADING)
            self.queue.reject_waiting(self.not_serving())
        try:
            await self.loaded_engine.pause(InFlightPolicy.INTERRUPT)
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
