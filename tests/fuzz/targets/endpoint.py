"""The endpoint for agents: requests of every route over HTTP, with the demo's own chat template.

A part is a request: the head is `METHOD PATH KEY`, where `{id}` in the path is the session's id and
the key is `own` (the endpoint's), `session`, `wrong` or `none`; the body is the request's.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from fuzz.inputs import Input
from fuzz.target import AsyncTarget, Fell

import treadle.trainer.demo
from treadle.agent_loop import (
    Completion,
    LoopLimits,
    PlacedImage,
    PromptTooLongError,
    RequestContext,
    SamplingParams,
    Services,
)
from treadle.agent_loop.aio import run_until
from treadle.agent_loop.hf import HfRenderer
from treadle.agent_loop.proxy import AgentConstraints, AgentSampling
from treadle.agent_loop.proxy.admin import SessionAdmin
from treadle.agent_loop.proxy.app import make_app
from treadle.agent_loop.proxy.server import SharedServer
from treadle.agent_loop.proxy.sessions import EndpointSessions
from treadle.agent_loop.testing import reply

MODEL = Path(treadle.trainer.demo.__file__).parent / "calculator" / "model"
KEYS = ("own", "session", "wrong", "none")
ROUTES = (
    "POST /sessions",
    "POST /sessions/{id}/v1/chat/completions",
    "POST /sessions/{id}/v1/responses",
    "POST /sessions/{id}/v1/messages",
    "POST /sessions/{id}/v1/messages/count_tokens",
    "POST /sessions/{id}/inference/v1/generate",
    "GET /sessions/{id}/v1/models",
    "POST /sessions/{id}/reward",
    "POST /sessions/{id}/finish",
    "DELETE /sessions/{id}",
)
_ASK = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}
_CONTEXT = 512
_STATUSES = {200, 201, 204, 400, 401, 404, 405, 409, 413, 429}
_MAX_BODY_BYTES = 1 << 16


class _Five:
    """Samples the same ids for every prompt."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        if len(prompt) >= _CONTEXT:
            raise PromptTooLongError(f"{len(prompt)} prompt tokens")
        return reply(self._ids, params)

    def finish_session(self, session_id: str) -> None:
        return None


class EndpointTarget(AsyncTarget):
    """An endpoint with one session per input."""

    promises = (
        "Every request is answered with one of the documented statuses, never 5xx, and JSON; a "
        "failed one with the error of its API. A wrong key never succeeds. Then a new session "
        "still completes as before and can be finished, and no trace is logged."
    )
    form = "json"
    heads = tuple(f"{route} {key}" for route in ROUTES for key in KEYS)
    words = tuple(
        word.encode()
        for word in (
            *("role", "content", "tool_calls", "image_url", "data:image/png;base64,", "system"),
            *("developer", "assistant", "tool", "tool_call_id", "\\ud800", "\\u0000", "stop"),
            *("<|im_start|>", "<|im_end|>", "{{", "{%", "<tool_call>", "\ufeff", "1e400"),
        )
    )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        renderer = HfRenderer.from_directory(str(MODEL))
        sessions = EndpointSessions(max_in_flight=64)
        ids = renderer.encode("It is 5.")
        services = Services(
            generator=_Five(ids),
            renderer=renderer,
            limits=LoopLimits(max_response_tokens=_CONTEXT, max_context_tokens=_CONTEXT),
            sampling=SamplingParams(max_tokens=64),
        )
        admin = SessionAdmin(
            sessions,
            services,
            key="own",
            sampling=AgentSampling.REFUSE,
            constraints=AgentConstraints.REFUSE,
            deadline_s=60.0,
            max_sessions=256,
            max_session_requests=8,
        )
        app = make_app(sessions, model="policy", max_body_bytes=_MAX_BODY_BYTES, more=admin.routes)
        ended = asyncio.Event()
        watching = asyncio.create_task(run_until(ended.wait(), admin.deadlines))
        server = SharedServer(app, host="127.0.0.1", port=0)
        try:
            async with server as address, httpx.AsyncClient(base_url=address, timeout=30) as web:
                self._web, self._sessions = web, sessions
                self._answer = await self._complete()
                yield
        finally:
            ended.set()
            await watching

    async def give(self, parts: Input) -> None:
        opened = await self._open()
        for part in parts:
            await self._send(part.head, part.body, opened)
        await self._web.delete(f"/sessions/{opened['id']}", headers=_key("own", ""))
        if (answer := await self._complete()) != self._answer:
            raise Fell(f"a session was answered {self._answer!r} before, and now {answer!r}")
        self.reset = len(self._sessions) > 100

    async def _send(self, head: str, body: bytes, opened: dict[str, Any]) -> None:
        method, path, key = head.split(" ")
        url = path.replace("{id}", opened["id"])
        headers = _key(key, opened["api_key"])
        answer = await self._web.request(method, url, content=body, headers=headers)
        if answer.status_code not in _STATUSES:
            raise Fell(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        if key in ("wrong", "none") and answer.is_success:
            raise Fell(f"{method} {path} succeeded with the key {key!r}")
        if answer.is_error:
            try:
                error = answer.json()["error"]
                complete = bool(error["message"] and error["type"])
                complete = complete and bool("/v1/messages" in path or error["code"])
            except (ValueError, KeyError, TypeError):
                complete = False
            if not complete:
                raise Fell(f"{method} {path}: no error of its API: {answer.text[:200]}")
            if len(answer.content) > 4000:
                raise Fell(f"{method} {path}: an error of {len(answer.content)} bytes")
        elif answer.headers.get("content-type", "").startswith("application/json"):
            json.loads(answer.text)

    async def _open(self) -> dict[str, Any]:
        answer = await self._web.post(
            "/sessions", json={"task_id": "t", "seed": 1}, headers=_key("own", "")
        )
        if answer.status_code != 201:
            raise Fell(f"no session can be opened: {answer.status_code} {answer.text[:200]}")
        return dict(answer.json())

    async def _complete(self) -> str:
        opened = await self._open()
        below, key = f"/sessions/{opened['id']}", _key("session", opened["api_key"])
        answer = await self._web.post(f"{below}/v1/chat/completions", json=_ASK, headers=key)
        done = await self._web.post(
            f"{below}/finish", json={"reward": 1.0}, headers=_key("own", "")
        )
        if answer.status_code != 200 or done.status_code != 200:
            raise Fell(f"a session failed: {answer.text[:200]} {done.text[:200]}")
        return str(answer.json()["choices"][0]["message"]["content"])


def _key(kind: str, session_key: str) -> dict[str, str]:
    if kind == "none":
        return {}
    return {"authorization": f"Bearer {session_key if kind == 'session' else kind}"}
