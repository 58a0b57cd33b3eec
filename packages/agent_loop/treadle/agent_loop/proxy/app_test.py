"""Clients that send half a request, over real sockets."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx
import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    PromptTooLongError,
    Rendering,
    SamplingParams,
    Services,
    ToolSpec,
)
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
    sessions: EndpointSessions

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
async def serving(renderer: ByteRenderer | None = None) -> AsyncIterator[Endpoint]:
    services = Services(
        generator=ScriptedGenerator(["one"]),
        renderer=renderer or ByteRenderer(),
        limits=LoopLimits(max_response_tokens=100, max_context_tokens=200),
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
    served = app.make_app(sessions, model="policy", max_body_bytes=2000)
    async with SharedServer(served, host="127.0.0.1", port=0) as address:
        yield Endpoint(address=address, slow=both[0], other=both[1], sessions=sessions)


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


class BoundedBytes(ByteRenderer):
    """Refuses a long text before it encodes it, as `HfRenderer` does."""

    def bounded(self, max_tokens: int) -> "BoundedBytes":
        return self

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
        if len(messages[0].content) > 200:
            raise PromptTooLongError("it has more than 200 characters")
        return super().render(messages, tools=tools)

    def decode(self, token_ids: Sequence[int]) -> str:
        assert len(token_ids) <= 200, "ids that do not fit are not decoded"
        return super().decode(token_ids)


async def test_no_path_does_work_for_a_text_that_does_not_fit() -> None:
    """Found by an attacker: 20 MiB to `count_tokens` took all memory."""
    async with serving(renderer=BoundedBytes()) as endpoint:
        long = {"messages": [{"role": "user", "content": "u" * 201}]}
        for path in ("messages/count_tokens", "messages", "chat/completions"):
            answer = await endpoint.ask("POST", path, json={**long, "max_tokens": 1})
            assert answer.status_code == 400, path
        ids = {"token_ids": [65] * 201, "sampling_params": {}}
        answer = await endpoint.ask("POST", "../inference/v1/generate", json=ids)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        for stop in (["s"] * 65, "s" * 1025):
            answer = await endpoint.ask("POST", "chat/completions", json={**ASK, "stop": stop})
            assert answer.json()["error"]["param"] == "stop"


async def test_counting_takes_a_place_of_the_endpoint() -> None:
    async with serving() as endpoint:
        with endpoint.sessions.slot():
            answer = await endpoint.ask("POST", "messages/count_tokens", json=ASK)
        assert answer.status_code == 429
        counted = await endpoint.ask("POST", "messages/count_tokens", json=ASK)
        assert counted.json() == {"input_tokens": 4}


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
    """Eight times the longest completion request: 16000 bytes here."""
    async with serving() as endpoint:
        url = urlsplit(endpoint.address)
        head = (
            f"POST /sessions/{endpoint.slow.id}/reward HTTP/1.1\r\nHost: here\r\n"
            f"Authorization: Bearer {endpoint.slow.key}\r\nContent-Length: 4501\r\n\r\n"
        ).encode()
        writers, refusals = [], []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(head + b" " * 4500)
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
