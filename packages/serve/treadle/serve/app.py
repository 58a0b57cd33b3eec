"""The paths of the API, on HTTP: which are answered, by what, and which are refused.

Invariant: every path that the SDK 0.36 to 0.38 has is in `PATHS`, which `docs/serve.md` shows. A
request without the server's key is not read.
"""

from __future__ import annotations

import hmac
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treadle.serve.errors import ServiceError, refused
from treadle.serve.service import Service
from treadle.serve.training import MODEL_KINDS

__all__ = ["PATHS", "make_app"]

_log = logging.getLogger(__name__)

_MAX_BODY: Final = 256 << 20
_PREFIX: Final = "/api/v1"
_PROTOBUF: Final = "application/x-protobuf"
_CLIENT_CONFIG: Final[Mapping[str, Any]] = MappingProxyType(
    # The SDK's defaults, under which it asks for no path that is refused below.
    {
        "pjwt_auth_enabled": False,
        "proto_compress_fwdbwd": False,
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": False,
    }
)

_MISFITS: Final = (
    *(AttributeError, KeyError, TypeError, ValueError, OverflowError),
    *(sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError),
)
"""What a body raises whose values are of other types or sizes than they must be."""

Given = Mapping[str, Any]
Handler = Callable[[Service, Request, Given], Any]
_Refusal = tuple[str, str]


def _page(request: Request) -> tuple[int, int]:
    try:
        offset = int(request.query_params.get("offset", 0))
        size = int(request.query_params.get("limit", 20))
    except ValueError:
        raise ServiceError(f"{request.url.query}: offset and limit are numbers") from None
    return max(0, offset), min(max(1, size), 10_000)


def _of_model(kind: str) -> Handler:
    return lambda service, _, given: service.model_request(kind, given)


def _given(answer: Callable[[Service, Given], Any]) -> Handler:
    return lambda service, _, given: answer(service, given)


def _placed(answer: Callable[..., Any]) -> Handler:
    return lambda service, request, _: answer(service, **request.path_params)


def _listed(answer: Callable[[Service, int, int], Any]) -> Handler:
    return lambda service, request, _: answer(service, *_page(request))


_RUN: Final = "/training_runs/{model}"
_CHECKPOINT: Final = _RUN + "/checkpoints/{checkpoint:path}"
_NO_PROJECTS = "projects", "sessions belong to the server's owner; leave project_id out"
_NO_BILLING = "billing", "it is your own machine; see the directory's size"
_NO_SHARING = "public checkpoints", "export the weights (save_weights_external) and share the files"
_NO_KEYS = "key management", "the server's key is in the file `key` of its directory"

PATHS: Final[Mapping[tuple[str, str], Handler | _Refusal]] = MappingProxyType(
    {
        ("GET", "/healthz"): lambda *_: {"status": "ok"},
        ("POST", "/client/config"): lambda *_: _CLIENT_CONFIG,
        ("POST", "/client/dynamic_config"): lambda *_: {"sample_cancel_enabled": True},
        ("POST", "/telemetry"): lambda *_: {"status": "accepted"},
        ("GET", "/get_server_capabilities"): lambda service, *_: service.capabilities(),
        ("POST", "/create_session"): _given(Service.create_session),
        ("POST", "/session_heartbeat"): _given(Service.heartbeat),
        ("GET", "/sessions"): _listed(Service.sessions),
        ("GET", "/sessions/{session}"): _placed(Service.session),
        ("POST", "/sessions/{session}/finish"): _placed(Service.finish_session),
        ("POST", "/create_model"): _given(Service.create_model),
        ("POST", "/unload_model"): _given(Service.unload_model),
        ("POST", "/get_info"): _given(Service.get_info),
        ("POST", "/load_weights"): _given(Service.load_weights),
        **{("POST", f"/{kind}"): _of_model(kind) for kind in MODEL_KINDS if kind != "load_weights"},
        ("POST", "/create_sampling_session"): _given(Service.create_sampler),
        ("POST", "/asample"): _given(Service.sample),
        ("POST", "/cancel_future"): _given(Service.cancel),
        ("POST", "/retrieve_future"): _given(Service.result),
        ("GET", "/samplers/{sampler}"): _placed(Service.sampler),
        ("POST", "/weights_info"): _given(Service.weights_info),
        ("POST", "/copy_weights"): _given(Service.copy_weights),
        ("GET", "/training_runs"): _listed(Service.runs),
        ("GET", _RUN): _placed(Service.run),
        ("GET", "/checkpoints"): _listed(Service.checkpoints),
        ("GET", _RUN + "/checkpoints"): _placed(Service.checkpoints_of),
        ("GET", _CHECKPOINT + "/external_weights_urls"): _placed(Service.exported_files),
        ("POST", _CHECKPOINT + "/publish"): _NO_SHARING,
        ("DELETE", _CHECKPOINT + "/publish"): _NO_SHARING,
        ("PUT", _CHECKPOINT + "/ttl"): (
            lambda service, request, given: service.set_expiry(given, **request.path_params)
        ),
        ("DELETE", _CHECKPOINT): _placed(Service.delete_checkpoint),
        ("POST", "/forward_backward"): lambda service, _, given: service.passes(given["body"]),
        ("POST", "/retrieve_futures"): (
            "polls of many futures",
            "use the client's defaults, which ask for each by retrieve_future",
        ),
        ("POST", "/join_sampling_session"): (
            "numbers for copies of a sampling client",
            "use the client's defaults, under which copies number themselves",
        ),
        ("POST", "/create_custom_loss"): (
            "losses that clients upload",
            "use the client's defaults, under which custom losses run in the client",
        ),
        ("POST", "/auth/token"): _NO_KEYS,
        ("GET", "/auth/apikey/me"): _NO_KEYS,
        ("DELETE", "/auth/apikey/me"): _NO_KEYS,
        ("GET", "/audit"): ("audit log", "see logs/serve.log in the server's directory"),
        ("GET", "/billing/usage/events"): _NO_BILLING,
        ("GET", "/billing/usage/checkpoints/current"): _NO_BILLING,
        ("PUT", "/sessions/{session}/project"): _NO_PROJECTS,
        ("GET", "/sessions/search"): ("search of sessions", "list them"),
        ("GET", "/sessions/{session}/trace_export"): (
            "export of traces",
            "keep what the client sends and receives there",
        ),
    }
)
"""By method and path below /api/v1: what answers, or what is refused and what to do instead."""


def make_app(service: Service, key: str) -> Starlette:
    """Returns the application, for clients that send the key as X-API-Key."""
    # Paths without parameters first, and longer ones before those that a parameter would swallow.
    ordered = sorted(PATHS.items(), key=lambda each: ("{" in each[0][1], -len(each[0][1])))

    async def metrics(request: Request) -> Response:
        if not _is_allowed(request, key):
            return _error("send the server's key, as Authorization: Bearer KEY", 401)
        return Response(generate_latest(service.totals.registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            *(
                Route(_PREFIX + path, _endpoint(service, key, path, answer), methods=[method])
                for (method, path), answer in ordered
            ),
        ]
    )


def _endpoint(
    service: Service, key: str, path: str, answer: Handler | _Refusal
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            if path != "/healthz" and not _is_allowed(request, key):
                raise ServiceError(
                    "the key is not the server's: set TINKER_API_KEY to what is in the file `key` "
                    "of its directory",
                    status=401,
                )
            if isinstance(answer, tuple):
                raise refused(*answer)
            given = await _read(request)
            done = answer(service, request, given)
            if isinstance(done, Awaitable):
                answered = await done
                return Response(answered.body, media_type=answered.type)
            return Response(status_code=204) if done is None else JSONResponse(dict(done))
        except ServiceError as error:
            return _error(str(error), error.status)
        except _MISFITS as error:
            _log.info("%s", path, exc_info=error)
            return _error(f"the body does not fit {path}: {type(error).__name__}: {error}", 400)
        except sqlite3.Error as error:
            _log.exception("%s", path)
            text = f"the server's database failed: {error}. Free its disk and ask again"
            return _error(text, 503)

    return endpoint


def _is_allowed(request: Request, key: str) -> bool:
    given = request.headers.get("x-api-key") or request.headers.get("authorization", "")
    return hmac.compare_digest(given.removeprefix("Bearer ").encode(), key.encode())


async def _read(request: Request) -> Given:
    """Returns the body: of JSON its object, of protobuf its bytes, as `body`."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY:
                raise ServiceError(
                    f"the request is longer than {_MAX_BODY} bytes: send less", status=413
                )
    except ClientDisconnect:
        raise ServiceError("the client has left") from None
    if encoding := request.headers.get("content-encoding"):
        raise refused(f"content-encoding {encoding}", "send bodies as they are, the default")
    if request.headers.get("content-type", "").startswith(_PROTOBUF):
        return {"body": bytes(body)}
    if not body:
        return {}
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ServiceError(f"the body is a {type(given).__name__}, and must be an object")
    return given


def _error(message: str, status: int) -> Response:
    return JSONResponse({"detail": message}, status_code=status)
