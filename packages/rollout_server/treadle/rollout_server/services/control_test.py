"""Pause and resume over real gRPC, in front of the fake engine."""

import asyncio

import pytest

from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.services.testing import fake_server, refusal, want


@pytest.mark.asyncio
async def test_a_server_that_fails_while_it_resumes_stays_failed() -> None:
    async with fake_server() as server:
        await server.control.Pause(
            srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN), timeout=60
        )

        async def resume() -> None:
            server.replica.lifecycle.move(ServerState.FAILED)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.engine, "resume", resume)
            await server.control.Resume(srv.ResumeRequest(), timeout=60)
        assert server.replica.state is ServerState.FAILED
        assert (await refusal(server.generate()))[:2] == ("UNAVAILABLE", "PAUSED")


@pytest.mark.asyncio
async def test_a_pause_that_is_given_up_leaves_the_server_serving() -> None:
    async with fake_server(latency_s=1.0) as server:
        call = server.generation.Generate(want(), timeout=60)
        await call.read()
        pause = srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)
        given_up = server.control.Pause(pause, timeout=60)
        while server.replica.state is ServerState.SERVING:
            await server.settle()
        given_up.cancel()
        info = srv.GetServerInfoRequest()
        while (
            await server.control.GetServerInfo(info, timeout=60)
        ).state != srv.SERVER_STATE_SERVING:
            pass
        call.cancel()


@pytest.mark.asyncio
async def test_pause_rejects_calls_that_the_engine_has_not_started() -> None:
    async with fake_server(latency_s=1.0, max_running=1) as server:
        running = server.generation.Generate(want(), timeout=60)
        await running.read()
        waiting = asyncio.create_task(refusal(server.generate()))
        while server.replica.admission.in_flight < 2:
            await server.settle()
        info = await server.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
        assert (info.load.running, info.load.queued, info.load.started) == (1, 1, 1)
        pause = srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_CONTINUE)
        await server.control.Pause(pause, timeout=60)
        assert (await waiting)[:2] == ("UNAVAILABLE", "PAUSED")
        assert server.engine.counters.started == 1
        running.cancel()
