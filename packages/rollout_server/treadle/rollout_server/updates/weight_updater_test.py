"""The state of a server whose update ended at the wrong moment."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    ElementType,
    InFlightPolicy,
    ModelInfo,
    NamedTensor,
    TensorSpec,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine, FakeLatency
from treadle.rollout_server.errors import CapabilityMissing, EngineFailed, RolloutServerError
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.testing import FakeClock
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.weight_update import UpdateState, WeightUpdate

TENSORS = (TensorSpec(name="a", element_type=ElementType.FLOAT32, shape=(4096,)),)
LEASE_S = 10.0
DRAIN = InFlightPolicy.DRAIN
STAGED = Begin(update_id="u", weight_version=1, tensors=TENSORS, lease_s=LEASE_S)


class Engine(FakeEngine):
    """Counts its resumes; waits in `pause` and `load_weights` until the test lets it."""

    def __init__(self, clock: FakeClock) -> None:
        model = ModelInfo(architecture="fake", vocab_size=64, context_length=64)
        super().__init__(model=model, parameters=TENSORS, latency=FakeLatency(), clock=clock)
        self.resumes = 0
        self.error: Exception | None = None
        self.may_pause, self.loading, self.may_load = (asyncio.Event() for _ in range(3))
        self.may_pause.set()
        self.may_load.set()
        self.broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def pause(self, policy: InFlightPolicy) -> None:
        await self.may_pause.wait()
        await super().pause(policy)

    async def resume(self) -> None:
        self.resumes += 1
        await super().resume()

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        self.loading.set()
        await self.may_load.wait()
        if self.error is not None:
            raise self.error
        await super().load_weights(tensors, version=version, in_place=in_place)

    async def wait_failed(self) -> Exception:
        return await asyncio.shield(self.broken)


def start() -> tuple[Replica, Engine, FakeClock]:
    clock = FakeClock()
    replica, engine = Replica(ServerConfig(), clock), Engine(clock)
    replica.serve(engine)
    return replica, engine, clock


async def staged(replica: Replica, clock: FakeClock) -> WeightUpdate:
    """Returns an update whose bytes have arrived."""
    update = await replica.updates.begin(STAGED)
    data = bytes(range(256)) * 64
    update.incoming.assembler.write(0, 0, data)
    update.incoming.filled(0)
    assert update.state is UpdateState.COMPLETE
    return update


@pytest.mark.asyncio
async def test_a_paused_server_stays_paused_whenever_its_update_in_place_is_aborted() -> None:
    for turns in range(8):
        replica, engine, _ = start()
        await replica.pause(DRAIN)
        begin = asyncio.create_task(replica.updates.begin(replace(STAGED, in_place=DRAIN)))
        await asyncio.sleep(0)  # Now there is an update.
        for _ in range(turns):
            await asyncio.sleep(0)
        await replica.updates.abort("u")
        await asyncio.gather(begin, return_exceptions=True)
        assert engine.resumes == 0
        assert replica.state in (ServerState.PAUSED, ServerState.LOADING)
        await replica.aclose()


@pytest.mark.asyncio
async def test_the_lease_stands_still_while_a_commit_waits_for_its_turn() -> None:
    replica, engine, clock = start()
    await staged(replica, clock)
    engine.may_pause.clear()
    pause = asyncio.create_task(replica.pause(DRAIN))
    await asyncio.sleep(0)
    commit = asyncio.create_task(replica.updates.commit("u", DRAIN))
    for _ in range(3):
        await asyncio.sleep(0)
    clock.advance(3 * LEASE_S)
    engine.may_pause.set()
    await pause
    assert await commit == 1
    assert replica.state is ServerState.PAUSED
    await replica.aclose()


@pytest.mark.asyncio
async def test_an_engine_that_breaks_during_a_commit_leaves_no_update() -> None:
    replica, engine, clock = start()
    await staged(replica, clock)
    engine.may_load.clear()
    commit = asyncio.create_task(replica.updates.commit("u", DRAIN))
    await engine.loading.wait()
    failed = asyncio.Event()
    replica.lifecycle.observe(lambda state: failed.set())
    engine.broken.set_result(RuntimeError("its worker died"))
    await failed.wait()
    assert replica.state is ServerState.FAILED
    engine.error = RuntimeError("gone")
    engine.may_load.set()
    with pytest.raises(EngineFailed, match="its worker died"):
        await commit
    assert replica.current_update.live is None
    for _ in range(3):  # One error, however many calls it turns away.
        with pytest.raises(EngineFailed) as caught:
            _ = replica.engine
    assert len(caught.traceback) == 3
    await replica.aclose()


@pytest.mark.asyncio
async def test_the_bytes_of_a_refused_update_go_with_it_though_its_error_stays() -> None:
    replica, engine, clock = start()
    update = await staged(replica, clock)
    place = next(update.incoming.assembler.named_tensors()).place
    assert place is not None
    engine.error = CapabilityMissing("fake", "float32")
    with pytest.raises(RolloutServerError) as caught:
        await replica.updates.commit("u", DRAIN)
    assert update.state is UpdateState.COMPLETE
    assert os.stat(place.path).st_blocks > 0
    await replica.updates.abort("u")
    # What the error's frames hold keeps the file, but none of its memory.
    assert caught.value is engine.error and os.stat(place.path).st_blocks == 0
    await replica.aclose()
