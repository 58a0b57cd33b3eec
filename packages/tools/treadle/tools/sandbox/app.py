"""The HTTP application: SandboxFusion's API in front of a sandbox.

Invariant: the result of a program is a 200 with SandboxFusion's body; 422 is a request that cannot
be run, 429 one that was not started because the queue is full (with `Retry-After`). A
client that hangs up ends its program within a second. Bodies are bounded, each (413) and together
(503 with `Retry-After`), in the time they may take to arrive (408), and in the number of their JSON
values before they are parsed (422): 3 bytes of `[],` become 64 of memory. A web page cannot run
programs through a browser on this host (403): only browsers send `Origin` with a POST.

Who waits: the handler, for the body, for its turn with a large one, which a thread decodes one at a
time, then for the sandbox or for the client to hang up, whichever comes first. A
client sees a blank, which JSON allows before a value, every `_BEAT_S`: so that a client
with the usual timeout per byte never takes a long queue for a dead server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from treadle.agent_loop.json_values import has_more_values
from treadle.tools.sandbox.execution import (
    Execution,
    Program,
    SandboxBusyError,
    SandboxError,
    UnsupportedProgramError,
)
from treadle.tools.sandbox.local import LocalSandbox
from treadle.tools.sandbox.wire import (
    QUEUE_HEADER,
    WARM_HEADER,
    InvalidRequestError,
    decode_request,
    encode_failure,
    encode_response,
)

_BEAT_S: Final = 5.0
_ROOM: Final = 4 << 20  # for code and stdin, beside the files
_TOGETHER: Final = 8  # of the largest bodies; far more of those that are usual
_BODY_S: Final = 60.0
_LARGE: Final = 1 << 16
_OTHER_VALUES: Final = 64  # beside the names and contents of files


def make_app(sandbox: LocalSandbox) -> Starlette:
    """Returns the application; the sandbox must have been entered."""
    bodies = _Bodies(2 * (sandbox.limits.disk_mib << 20) + _ROOM)
    most_values = 2 * sandbox.limits.entries + _OTHER_VALUES
    one_at_a_time = asyncio.Lock()

    async def decode(body: bytearray) -> Program:
        if len(body) < _LARGE:
            return _decode(body, most_values)
        async with one_at_a_time:
            return await asyncio.to_thread(_decode, body, most_values)

    async def run_code(request: Request) -> Response:
        if page := request.headers.get("origin"):
            return JSONResponse({"detail": f"a web page ({page}) may not run programs here"}, 403)
        body = await bodies.read(request)
        size = len(body)
        try:
            program = await decode(body)
        except InvalidRequestError as error:
            bodies.release(size)
            return _unprocessable(error.field, error.reason)
        except BaseException:
            bodies.release(size)
            raise
        return _Run(sandbox, program, lambda: bodies.release(size))

    async def ping(request: Request) -> Response:
        return PlainTextResponse("pong")

    async def stats(request: Request) -> Response:
        return JSONResponse(asdict(sandbox.stats()))

    async def run_jupyter(request: Request) -> Response:
        return JSONResponse({"detail": "this server has no notebooks; use /run_code"}, 501)

    return Starlette(
        routes=[
            Route("/run_code", run_code, methods=["POST"]),
            Route("/run_jupyter", run_jupyter, methods=["POST"]),
            Route("/v1/ping", ping),
            Route("/v1/stats", stats),
        ]
    )


class _Bodies:
    """Bounds the bodies of requests: each, and those that are read, queued or run together."""

    def __init__(self, most_each: int) -> None:
        self._most_each = most_each
        self._together = 0

    async def read(self, request: Request) -> bytearray:
        """Returns the body, whose size must be released; a refused client is disconnected."""
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                await self._read(request, body)
        except TimeoutError:
            self.release(len(body))
            why = f"the body did not arrive in {_BODY_S:g} s; {len(body)} bytes did"
            raise HTTPException(408, why, {"connection": "close"}) from None
        except BaseException:
            self.release(len(body))
            raise
        return body

    async def _read(self, request: Request, body: bytearray) -> None:
        async for part in request.stream():
            body += part
            self._together += len(part)
            if len(body) > self._most_each:
                why = f"the body has more than {self._most_each} bytes"
                raise HTTPException(413, why, {"connection": "close"})
            if self._together > _TOGETHER * self._most_each:
                why = f"requests of {self._together} bytes are under way, which is the limit"
                raise HTTPException(503, why, {"connection": "close", "retry-after": "1"})

    def release(self, size: int) -> None:
        """The program of a body of this size has ended."""
        self._together -= size


def _decode(body: bytearray, most_values: int) -> Program:
    if has_more_values(body, most_values):
        raise InvalidRequestError(
            "body", f"more than {most_values} JSON values, which suffice for all files allowed here"
        )
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("body", f"not JSON: {error}") from None
    return decode_request(value)


class _Run(Response):
    """Runs a program and answers with what came of it, unless the client hangs up before."""

    def __init__(
        self, sandbox: LocalSandbox, program: Program, release: Callable[[], None]
    ) -> None:
        self._sandbox = sandbox
        self._program = program
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(scope, receive, send)
        finally:
            self._release()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.create_task(self._sandbox.run(self._program))
        listening = asyncio.create_task(_hung_up(receive))
        begun = False
        try:
            while not working.done() and not listening.done():
                done, _ = await asyncio.wait(
                    {working, listening}, timeout=_BEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    if not begun:
                        await send(_start(200, {"content-type": "application/json"}))
                        begun = True
                    await send({"type": "http.response.body", "body": b" ", "more_body": True})
            if not working.done():
                return
            answer = _answer(working)
            if begun:  # the queue was not full then, and the program not refused: it is 200
                await send({"type": "http.response.body", "body": bytes(answer.body)})
            else:
                await answer(scope, receive, send)
        finally:
            for task in (working, listening):
                task.cancel()
            await asyncio.gather(working, listening, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: Mapping[str, str]) -> Message:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


def _answer(working: asyncio.Task[Execution]) -> Response:
    try:
        execution = working.result()
    except UnsupportedProgramError as error:
        return _unprocessable("body", str(error))
    except SandboxBusyError as busy:
        headers = {"retry-after": f"{busy.retry_after_s:.0f}"}
        return JSONResponse({"detail": str(busy)}, 429, headers)
    except SandboxError as error:
        return JSONResponse(encode_failure(str(error)))
    headers = {QUEUE_HEADER: f"{execution.queue_s:.6f}", WARM_HEADER: str(int(execution.warm))}
    return JSONResponse(encode_response(execution), headers=headers)


def _unprocessable(field: str, reason: str) -> Response:
    """Returns a 422 in FastAPI's format, which SandboxFusion's clients expect."""
    where = ["body"] if field == "body" else ["body", field]
    detail = [{"type": "value_error", "loc": where, "msg": reason}]
    # ASCII, unlike `JSONResponse`: what was wrong may be that it cannot be encoded.
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")
