"""Pause and resume over real gRPC, in front of the fake engine."""

import asyncio

import pytest

from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.services.conftest import bench, ids, refusal, want


@pytest.mark.asyncio
async def test_pause_turns_away_and_resume_brings_back() -> None:
    async with bench() as it:
        pause = srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)
        before = ids(await it.generate())
        await it.control.Pause(pause, timeout=60)
        await it.control.Pause(pause, timeout=60)
        code, reason, (retry,) = await refusal(it.generate())
        assert (code, reason) == ("UNAVAILABLE", "PAUSED") and retry.HasField("retry_delay")
        release = srv.ReleaseMemoryRequest(kinds=[srv.MEMORY_KIND_WEIGHTS])
        await it.control.ReleaseMemory(release, timeout=60)
        resume = srv.ResumeRequest()
        assert (await refusal(it.control.Resume(resume, timeout=60)))[1] == "STATE_CONFLICT"
        restore = srv.RestoreMemoryRequest(kinds=[srv.MEMORY_KIND_WEIGHTS])
        await it.control.RestoreMemory(restore, timeout=60)
        await it.control.Resume(resume, timeout=60)
        assert ids(await it.generate()) == before
        early = await refusal(it.control.ReleaseMemory(release, timeout=60))
        unnamed = await refusal(it.control.Pause(srv.PauseRequest(), timeout=60))
    assert early[:2] == ("FAILED_PRECONDITION", "STATE_CONFLICT")
    assert unnamed[1] == "INVALID_FIELD"


@pytest.mark.asyncio
async def test_what_fails_while_it_resumes_stays_failed() -> None:
    async with bench() as it:
        await it.control.Pause(srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN), timeout=60)

        async def resume() -> None:
            it.server.replica.lifecycle.move(ServerState.FAILED)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(it.engine, "resume", resume)
            await it.control.Resume(srv.ResumeRequest(), timeout=60)
        assert it.server.replica.state is ServerState.FAILED
        assert (await refusal(it.generate()))[:2] == ("UNAVAILABLE", "PAUSED")


@pytest.mark.asyncio
async def test_a_pause_that_is_given_up_leaves_the_server_serving() -> None:
    async with bench(latency_s=1.0) as it:
        call = it.generation.Generate(want(), timeout=60)
        await call.read()
        pause = srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)
        given_up = it.control.Pause(pause, timeout=60)
        while it.server.replica.state is ServerState.SERVING:
            await it.settle()
        given_up.cancel()
        info = srv.GetServerInfoRequest()
        while (await it.control.GetServerInfo(info, timeout=60)).state != srv.SERVER_STATE_SERVING:
            pass
        call.cancel()


@pytest.mark.asyncio
async def test_pause_turns_away_what_the_engine_has_not_started() -> None:
    async with bench(latency_s=1.0, max_running=1) as it:
        running = it.generation.Generate(want(), timeout=60)
        await running.read()
        waiting = asyncio.create_task(refusal(it.generate()))
        while it.server.replica.admission.in_flight < 2:
            await it.settle()
        info = await it.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
        assert (info.load.running, info.load.queued, info.load.started) == (1, 1, 1)
        pause = srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_CONTINUE)
        await it.control.Pause(pause, timeout=60)
        assert (await waiting)[:2] == ("UNAVAILABLE", "PAUSED")
        assert it.engine.counters.started == 1
        running.cancel()
