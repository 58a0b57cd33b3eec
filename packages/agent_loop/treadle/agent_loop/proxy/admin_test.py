"""Sessions opened and finished by HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from treadle.agent_loop import EngineFailedError, LoopLimits, SamplingParams, Services
from treadle.agent_loop.aio import run_until
from treadle.agent_loop.proxy import AgentSampling
from treadle.agent_loop.proxy.admin import SessionAdmin
from treadle.agent_loop.proxy.allowances import AgentConstraints
from treadle.agent_loop.proxy.app import make_app
from treadle.agent_loop.proxy.sessions import EndpointSessions
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.agent_loop.testing.fake_clock import let_pass

pytestmark = pytest.mark.asyncio

OWN = {"authorization": "Bearer own"}
ASK = {"messages": [{"role": "user", "content": "u"}]}


@asynccontextmanager
async def serving(
    generator: ScriptedGenerator, *, max_sessions: int = 8
) -> AsyncIterator[httpx.AsyncClient]:
    sessions = EndpointSessions(max_in_flight=8)
    services = Services(
        generator=generator,
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=100),
        sampling=SamplingParams(max_tokens=50),
    )
    admin = SessionAdmin(
        sessions,
        services,
        key="own",
        sampling=AgentSampling.REFUSE,
        constraints=AgentConstraints.REFUSE,
        deadline_s=60.0,
        max_sessions=max_sessions,
        max_session_requests=4,
    )
    app = make_app(sessions, model="policy", max_body_bytes=10_000, more=admin.routes)
    done = asyncio.Event()
    watching = asyncio.create_task(run_until(done.wait(), admin.deadlines))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=OWN) as web:
        yield web
    done.set()
    await watching
    assert len(sessions) == 0


async def open_session(
    web: httpx.AsyncClient, **task: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    answer = await web.post("/sessions", json={"task_id": "row-0", **task})
    assert answer.status_code == 201, answer.text
    opened = answer.json()
    return opened, {"authorization": f"Bearer {opened['api_key']}"}


async def test_1_a_session_is_opened_used_and_finished_with_its_trajectory() -> None:
    async with serving(ScriptedGenerator(["one"])) as web:
        opened, key = await open_session(web, rollout_index=3, seed=5)
        url = f"{opened['base_url']}/chat/completions"
        answer = await web.post(url, json=ASK, headers=key)
        assert answer.json()["choices"][0]["message"]["content"] == "one"
        assert (await web.post(opened["reward_url"], json={"reward": 2}, headers=key)).is_success
        finished = await web.post(f"/sessions/{opened['id']}/finish")
        trajectory = finished.json()
        assert (trajectory["task_id"], trajectory["rollout_index"]) == ("row-0", 3)
        assert (trajectory["stop"], trajectory["reward"]) == ("finished", 2.0)
        (sample,) = trajectory["samples"]
        assert ByteRenderer().decode(sample["ids"]) == "<user>u<end><assistant>one<end>"
        assert sample["loss_mask"] == [False] * 4 + [True] * 4
        assert sample["spans"][1] == {
            "origin": "sampled",
            "start": 4,
            "stop": 8,
            "weight_version": 0,
        }
        assert trajectory["metrics"]["capture/root"] == 1
        assert (await web.post(url, json=ASK, headers=key)).status_code == 404
        again = await web.post(f"/sessions/{opened['id']}/finish")
        assert again.json()["error"]["code"] == "session_not_found"


async def test_2_keys_do_not_open_each_other_s_doors() -> None:
    async with serving(ScriptedGenerator(["one"])) as web:
        opened, key = await open_session(web)
        assert (await web.post("/sessions", json={}, headers=key)).status_code == 401
        finish = f"/sessions/{opened['id']}/finish"
        assert (await web.post(finish, headers=key)).status_code == 401
        assert (await web.post(f"{opened['base_url']}/chat/completions")).status_code == 401
        assert (await web.delete(f"/sessions/{opened['id']}")).status_code == 204
        assert (await web.post(finish)).status_code == 404


async def test_3_what_cannot_be_finished_says_why() -> None:
    async with serving(ScriptedGenerator([EngineFailedError("out of memory")])) as web:
        opened, key = await open_session(web)
        answer = await web.post(f"/sessions/{opened['id']}/finish", json={"reward": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_completion")
        opened, key = await open_session(web)
        await web.post(f"{opened['base_url']}/chat/completions", json=ASK, headers=key)
        answer = await web.post(f"/sessions/{opened['id']}/finish")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")


async def test_3b_of_several_that_finish_a_session_one_has_its_trajectory() -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        begun.set()
        await over.wait()
        yield b'{"reward": 1}'

    async with serving(ScriptedGenerator(["one"])) as web:
        opened, key = await open_session(web)
        await web.post(f"{opened['base_url']}/chat/completions", json=ASK, headers=key)
        finish = f"/sessions/{opened['id']}/finish"
        late = asyncio.create_task(web.post(finish, content=slow()))
        await begun.wait()
        assert (await web.post(finish)).status_code == 200
        over.set()
        assert (await late).status_code == 404


async def test_3c_bodies_are_bounded() -> None:
    async with serving(ScriptedGenerator()) as web:
        answer = await web.post("/sessions", content=b" " * ((1 << 20) + 1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_4_a_session_that_is_too_old_is_thrown_away() -> None:
    generator = ScriptedGenerator(["one"])
    generator.hold()
    async with serving(generator) as web:
        opened, key = await open_session(web)
        url = f"{opened['base_url']}/chat/completions"
        asking = asyncio.create_task(web.post(url, json=ASK, headers=key))
        await generator.until_running(1)
        let_pass(60.0)
        assert (await asking).status_code in (499, 504)
        await generator.until_idle()
    assert len(generator.finished_sessions) == 1


@pytest.mark.parametrize(
    ("task", "param"),
    [
        ({}, "task_id"),
        ({"task_id": "t", "rollout_index": -1}, "rollout_index"),
        ({"task_id": "t", "seed": "x"}, "seed"),
        ({"task_id": "t", "loop": "x"}, "loop"),
        ([], "body"),
    ],
)
async def test_5_tasks_that_mean_nothing_are_refused(task: object, param: str) -> None:
    async with serving(ScriptedGenerator()) as web:
        answer = await web.post("/sessions", json=task)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_6_sessions_are_bounded() -> None:
    async with serving(ScriptedGenerator(), max_sessions=1) as web:
        await open_session(web)
        answer = await web.post("/sessions", json={"task_id": "t"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
