"""The HTTP application of the page: its files, and the JSON that it requests.

Invariant: it only reads. It answers requests whose Host is this machine's loopback, so that a site
whose name was made to point here (DNS rebinding) gets nothing, and that bring the token, because
every user of the host reaches loopback. The token comes with the first address, `?token=...`, and
stays in a cookie; programs send it as `Authorization: Bearer`. The content security policy lets the
page run its own scripts only; text that a model wrote is data everywhere.

Handlers are plain functions: Starlette runs each in a thread, so that a slow query holds up no
other request.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.tracing.trajectories import (
    IMAGE_TYPES,
    Filter,
    FilterError,
    UnknownColumnError,
    find_image,
)
from treadle.tracing.trajectories.run_directories import METRICS
from treadle.tracing.viewer.metric_lines import START, InvalidCursorError, read_increment
from treadle.tracing.viewer.runs import Run
from treadle.tracing.viewer.timeline import read_timeline
from treadle.tracing.viewer.trajectory import list_facets, list_page, read_trajectory

__all__ = ["make_app"]

_STATIC: Final = Path(__file__).parent / "static"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
_FOREVER: Final = {"cache-control": "public, max-age=31536000, immutable"}
_PAGE_ROWS: Final = 100
_MAX_ROWS: Final = 1_000

Handler = Callable[[Request], Response]


def make_app(runs: Sequence[Run], *, token: str | None) -> Starlette:
    """Returns the application.

    Args:
        runs: Runs in the order of the page.
        token: Without which nothing is answered. None: every user of this machine may read.
    """

    def run_of(request: Request) -> Run:
        index: int = request.path_params["run"]
        if index >= len(runs):
            raise HTTPException(404, f"there is no run {index}: the page has {len(runs)}")
        return runs[index]

    def answer(make: Callable[[Request, Run], object]) -> Handler:
        """Returns the handler that answers with what `make` returns for the run of the path."""

        def handle(request: Request) -> Response:
            run = run_of(request)
            try:
                return _json(make(request, run))
            except (FilterError, InvalidCursorError, UnknownColumnError) as error:
                raise HTTPException(400, str(error)) from None
            except OSError as error:
                raise HTTPException(500, f"{error.filename}: {error.strerror or error}") from None

        return handle

    def overview(request: Request) -> Response:
        return _json({"runs": [run.describe() for run in runs]})

    def image(request: Request) -> Response:
        path = find_image(run_of(request).directory, request.path_params["name"])
        if path is None:
            raise HTTPException(404, "this run has no such image")
        # The name is a hash of the content.
        return FileResponse(path, media_type=IMAGE_TYPES[path.suffix], headers=_FOREVER)

    run = "/api/runs/{run:int}"
    return Starlette(
        routes=[
            Route("/api/runs", overview),
            Route(f"{run}/metrics", answer(_metrics)),
            Route(f"{run}/facets", answer(lambda _, of: list_facets(of.trajectories))),
            Route(f"{run}/trajectories", answer(_trajectories)),
            Route(f"{run}/trajectory", answer(_trajectory)),
            Route(f"{run}/timeline", answer(_timeline)),
            Route(f"{run}/images/{{name}}", image),
            Mount("/", StaticFiles(directory=_STATIC, html=True)),
        ],
        middleware=[
            Middleware(_LoopbackOnly),
            *([] if token is None else [Middleware(_WithToken, token=token)]),
            Middleware(GZipMiddleware, minimum_size=4096),
        ],
        exception_handlers={HTTPException: _failure, Exception: _failure},
    )


def _metrics(request: Request, run: Run) -> object:
    found = read_increment(run.directory / METRICS, request.query_params.get("cursor", START))
    return {name: getattr(found, name) for name in found.__slots__}


def _trajectories(request: Request, run: Run) -> object:
    return list_page(
        run.trajectories,
        where=Filter.parse(request.query_params.get("filter", "")),
        order_by=[name for name in request.query_params.get("sort", "").split(",") if name],
        limit=min(_number(request, "limit", _PAGE_ROWS), _MAX_ROWS),
        offset=_number(request, "offset", 0),
    )


def _trajectory(request: Request, run: Run) -> object:
    found = read_trajectory(
        run,
        step=_number(request, "step"),
        phase=_text(request, "phase"),
        task_id=_text(request, "task_id"),
        rollout_index=_number(request, "rollout_index"),
    )
    if found is None:
        raise HTTPException(404, "no readable file of this run has such a trajectory")
    return found


def _timeline(request: Request, run: Run) -> object:
    step, phase = _number(request, "step"), _text(request, "phase")
    return read_timeline(run.directory, run.trajectories, step, phase)


def _text(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None:
        raise HTTPException(400, f"the parameter {name} is missing")
    return value


def _number(request: Request, name: str, default: int | None = None) -> int:
    value = request.query_params.get(name, default)
    if isinstance(value, int):
        return value
    text = _text(request, name)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(400, f"{name}={text!r:.40} is not a number from 0 to 999,999,999")
    return int(text)


def _json(value: object, status: int = 200) -> Response:
    """Returns the value as JSON, in which what is not finite is null."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(
        text.encode(errors="backslashreplace"),
        status,
        {"cache-control": "no-store"},
        "application/json",
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _failure(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _json({"error": error.detail}, error.status_code)
    return _json({"error": f"{type(error).__name__}: {error}"}, 500)


class _LoopbackOnly:
    """Refuses requests for another host, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], *_HEADERS]
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-cache"))
                message = {**message, "headers": headers}
            await send(message)

        host = Request(scope).headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        answer: ASGIApp = self._app
        if name.lower() not in _LOOPBACK:
            text = f"this page is for loopback, not for {host!r:.200}: use 127.0.0.1 or localhost"
            answer = _json({"error": text}, 403)
        await answer(scope, receive, send_with_headers)


class _WithToken:
    """Refuses requests without the token, and turns that of an address into a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        # Cookies are the same for all ports: each page on this machine has its own.
        cookie = f"treadle-view-{request.url.port}"
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        answer: ASGIApp = self._app
        if self._is_token(request.query_params.get("token", "")):
            bare = request.url.remove_query_params("token")
            path = f"/{bare.path.lstrip('/')}"  # of this page: "//name" would be another host
            answer = RedirectResponse(
                f"{path}?{bare.query}" if bare.query else path,
                status_code=303,
                headers={"cache-control": "no-store"},
            )
            answer.set_cookie(cookie, self._token.decode(), httponly=True, samesite="lax")
        elif not (
            self._is_token(request.cookies.get(cookie, ""))
            or (scheme.lower() == "bearer" and self._is_token(bearer))
        ):
            text = "open the address that the viewer printed: it ends with ?token=..."
            answer = _json({"error": text}, 401)
        await answer(scope, receive, send)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.strip().encode(), self._token)
