"""Clients that send half a request, over real sockets."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx
import pytest

from treadle.agent_loop import AgentTask, LoopLimits, Message, SamplingParams, Services
from treadle.agent_loop.capture import CapturedSession
from treadle.agent_loop.proxy import AgentSampling, app, body
from treadle.agent_loop.proxy.allowances import Allowances
from treadle.agent_loop.proxy.apis.chat_request import read_request
from treadle.agent_loop.proxy.apis.common import AgentRequest
from treadle.agent_loop.proxy.server import SharedServer
from treadle.agent_loop.proxy.sessions import EndpointSession, EndpointSessions
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator

pytestmark = pytest.mark.asyncio

USER = Message(role="user", content="u")
ASK = {"messages": [{"role": "user", "content": "u"}]}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An endpoint with two sessions and one place for requests."""

    address: str
    slow: EndpointSession
    other: EndpointSession

    async def half(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a request of `slow` without the end of its body."""
        reader, writer = await self.send_half()
        while not self.slow._in_flight:
            await self.models()
        return reader, writer

    async def send_half(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Does not wait until it has arrived."""
        url = urlsplit(self.address)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(
            f"POST /sessions/{self.slow.id}/v1/chat/completions HTTP/1.1\r\nHost: here\r\n"
            f"Authorization: Bearer {self.slow.key}\r\nContent-Length: 100\r\n\r\n{{".encode()
        )
        await writer.drain()
        return reader, writer

    async def models(self) -> None:
        """Waits for an answer, so that what was sent before has arrived."""
        assert (await self.ask("GET", "models")).status_code == 200

    async def ask(self, method: str, path: str, **more: object) -> httpx.Response:
        """Returns the answer to a request of `other`."""
        url = f"{self.address}/sessions/{self.other.id}/v1/{path}"
        headers = {"authorization": f"Bearer {self.other.key}"}
        async with httpx.AsyncClient(headers=headers, verify=False) as web:
            return await web.request(method, url, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def serving() -> AsyncIterator[Endpoint]:
    services = Services(
        generator=ScriptedGenerator(["one"]),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=100),
        sampling=SamplingParams(max_tokens=50),
    )
    task = AgentTask(task_id="t", sample_index=0, rollout_index=0, loop="x", messages=(USER,))
    sessions = EndpointSessions(max_in_flight=1)
    both = []
    for _ in range(2):
        captured = CapturedSession(task, services)
        session = EndpointSession(
            captured, services, sampling=AgentSampling.REFUSE, max_in_flight=4
        )
        sessions.add(session)
        both.append(session)
    served = app.make_app(sessions, model="policy", max_body_bytes=1000)
    async with SharedServer(served, host="127.0.0.1", port=0) as address:
        yield Endpoint(address=address, slow=both[0], other=both[1])


async def test_a_half_sent_body_takes_no_place_of_others() -> None:
    async with serving() as endpoint:
        _, writer = await endpoint.half()
        answer = await endpoint.ask("POST", "chat/completions", json=ASK)
        assert answer.status_code == 200, answer.text
        writer.close()


async def test_a_body_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as endpoint:
        monkeypatch.setattr(body, "BODY_S", 0.2)
        reader, writer = await endpoint.send_half()
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            await reader.readuntil(b"only 1 bytes of the request came in 0.2 s")
        assert not endpoint.slow._in_flight
        writer.close()


async def test_a_long_request_is_parsed_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(body: bytes, allowed: Allowances, _: EndpointSession) -> AgentRequest:
        begun.set()
        assert go_on.wait(60)
        return read_request(body, allowed)

    monkeypatch.setitem(app._APIS, "/v1/chat/completions", replace(app._CHAT, read=slow))
    monkeypatch.setattr(app, "_LONG", 10)
    async with serving() as endpoint:
        asking = asyncio.create_task(endpoint.ask("POST", "chat/completions", json=ASK))
        assert await asyncio.to_thread(begun.wait, 60)
        await endpoint.models()
        go_on.set()
        assert (await asking).status_code == 200


async def test_a_client_that_leaves_within_its_body_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving() as endpoint:
        _, writer = await endpoint.half()
        writer.close()
        while endpoint.slow._in_flight:
            await endpoint.models()
    assert not caplog.records


async def test_bodies_under_way_are_bounded_together() -> None:
    """Eight times the longest completion request: 8000 bytes here."""
    async with serving() as endpoint:
        url = urlsplit(endpoint.address)
        head = (
            f"POST /sessions/{endpoint.slow.id}/reward HTTP/1.1\r\nHost: here\r\n"
            f"Authorization: Bearer {endpoint.slow.key}\r\nContent-Length: 2501\r\n\r\n"
        ).encode()
        writers, refusals = [], []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(head + b" " * 2500)
            writers.append(writer)
            refusals.append(asyncio.create_task(reader.readline()))
        done, _ = await asyncio.wait(refusals, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert [refusal.result() for refusal in done] == [b"HTTP/1.1 429 Too Many Requests\r\n"]
        answer = await endpoint.ask("POST", "chat/completions", json=ASK)
        assert answer.status_code == 200, answer.text
        for writer in writers:
            writer.close()
        for refusal in refusals:
            refusal.cancel()
