"""The sandbox's HTTP server: the head is `METHOD PATH`, the body that of the request."""

import contextlib
import json
from collections.abc import AsyncIterator

import httpx
from fuzz.inputs import Input
from fuzz.target import AsyncTarget, Fell

from treadle.tools.sandbox import LocalSandbox, SandboxLimits
from treadle.tools.sandbox.app import make_app
from treadle.tools.sandbox.wire import decode_response

ROUTES = ("POST /run_code", "POST /run_jupyter", "GET /v1/ping", "GET /v1/stats")
_STATUSES = {200, 404, 405, 413, 422, 429, 501}


class SandboxTarget(AsyncTarget):
    """A sandbox server with a real sandbox, without warm interpreters."""

    promises = (
        "Every request is answered with one of the documented statuses, never 5xx, and JSON; a 200 "
        "is a program's own result, never a failure of the sandbox. Then no program runs or waits, "
        "and a program still runs. No trace is logged."
    )
    form = "json"
    heads = ROUTES
    words = (
        b"code",
        b"language",
        b"python",
        b"bash",
        b"fetch_files",
        b"files",
        b"stdin",
        b"\\u0000",
    )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        limits = SandboxLimits(timeout_s=2, memory_mib=256, entries=200, disk_mib=4)
        sandbox = LocalSandbox(limits=limits, places=2, warm=0, packages=(), preload=())
        async with sandbox:
            transport = httpx.ASGITransport(app=make_app(sandbox), raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://here", timeout=30
            ) as web:
                self._web, self._sandbox = web, sandbox
                self._given = 0
                yield

    async def give(self, parts: Input) -> None:
        for part in parts[:4]:
            method, path = part.head.split(" ")
            answer = await self._web.request(method, path, content=part.body)
            _check(f"{method} {path}", answer)
        self._given += 1
        stats = self._sandbox.stats()
        if stats.running or stats.waiting or stats.failed:
            raise Fell(f"afterwards {stats}")
        if self._given % 20 == 0:
            await self._check_good_program()
        self.reset = False

    async def _check_good_program(self) -> None:
        program = {"code": "print(2 + 3)", "language": "python", "run_timeout": 2}
        for _ in range(10):  # on a busy machine an interpreter may take seconds to start
            answer = await self._web.post("/run_code", json=program)
            result = answer.json().get("run_result", {})
            if result.get("stdout") == "5\n":
                return
            if result.get("status") != "TimeLimitExceeded":
                break
        raise Fell(f"a program does not run any more: {answer.text[:300]}")


def _check(what: str, answer: httpx.Response) -> None:
    if answer.status_code not in _STATUSES:
        raise Fell(f"{what}: {answer.status_code} {answer.text[:500]}")
    if answer.status_code != 200 or what != "POST /run_code":
        return
    body = json.loads(answer.text)
    if body["status"] == "SandboxError":
        raise Fell(f"{what}: {body['message'][:500]}")
    decode_response(body)
