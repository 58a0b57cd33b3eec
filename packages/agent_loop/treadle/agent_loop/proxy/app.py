"""The HTTP endpoint: the APIs that agents speak, below the address of a session.

    POST /sessions/<id>/v1/chat/completions        OpenAI's chat completions
    POST /sessions/<id>/v1/responses               OpenAI's Responses API
    POST /sessions/<id>/v1/messages                Anthropic's Messages API
    POST /sessions/<id>/v1/messages/count_tokens   the tokens of a prompt; records nothing
    POST /sessions/<id>/inference/v1/generate      vLLM's: ids to ids
    GET  /sessions/<id>/v1/models                  the only model
    POST /sessions/<id>/reward                     {"reward": 1.0}; the last one counts

Invariant: every answer, errors included, is JSON or an event stream in the API's own format.
Every API becomes the same request to the same session. If an agent hangs up, its request is
cancelled at once, down to the engine. Every request needs the session's key, as `x-api-key` or
`Authorization: Bearer`. Requests with too many values are refused unparsed, so that they do not
block the others; long requests are parsed by a thread.

Requests are tasks of the HTTP server. They wait for the generator, and for a disconnect.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treadle.agent_loop.errors import AgentLoopError
from treadle.agent_loop.proxy.allowances import Allowances
from treadle.agent_loop.proxy.apis.anthropic_answer import AnthropicAnswer, error_body
from treadle.agent_loop.proxy.apis.anthropic_request import read_anthropic_request
from treadle.agent_loop.proxy.apis.chat_answer import ChatAnswer
from treadle.agent_loop.proxy.apis.chat_request import read_request
from treadle.agent_loop.proxy.apis.common import AgentRequest, AnswerWriter, WholeAnswer
from treadle.agent_loop.proxy.apis.responses_answer import ResponsesAnswer
from treadle.agent_loop.proxy.apis.responses_request import read_responses_request
from treadle.agent_loop.proxy.apis.token_ids import TokenAnswer, read_token_request
from treadle.agent_loop.proxy.body import SMALL, Bodies
from treadle.agent_loop.proxy.errors import ApiError, answer_to
from treadle.agent_loop.proxy.event_stream import EventStream
from treadle.agent_loop.proxy.messages import read_object
from treadle.agent_loop.proxy.sessions import EndpointSession, EndpointSessions, read_reward

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CLIENT_GONE = 499
_MESSAGES = "/v1/messages"
_TOGETHER = 8
"""Largest bodies that may be under way at one time."""
_LONG = 1 << 16
"""Number of bytes from which on a request is parsed beside the event loop."""
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def make_app(
    sessions: EndpointSessions, *, model: str, max_body_bytes: int, more: Sequence[Route] = ()
) -> Starlette:
    """Returns the application.

    Args:
        sessions: The sessions that it serves.
        model: Model name in the answers.
        max_body_bytes: Maximum size of a completion request.
    """
    endpoint = _Endpoint(sessions, model=model, max_body_bytes=max_body_bytes)
    below = "/sessions/{session_id}"
    return Starlette(
        routes=[
            *(
                Route(f"{below}{path}", partial(endpoint.complete, api=api), methods=["POST"])
                for path, api in _APIS.items()
            ),
            Route(f"{below}{_MESSAGES}/count_tokens", endpoint.count_tokens, methods=["POST"]),
            Route(f"{below}/v1/models", endpoint.list_models, methods=["GET"]),
            Route(f"{below}/reward", endpoint.take_reward, methods=["POST"]),
            *more,
        ],
        exception_handlers={
            ApiError: _answer_error,
            HTTPException: _answer_unknown,
            # By name: what the handler of `Exception` answers is raised and logged again.
            ClientDisconnect: _answer_gone,
            Exception: _answer_bug,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One of the APIs that agents speak.

    Attributes:
        read: Parses a body, given what takes what is let pass, and the session.
        answer: Returns the writer of a request's answer, given the model's name.
    """

    read: Callable[[bytes, Allowances, EndpointSession], AgentRequest]
    answer: Callable[[AgentRequest, EndpointSession, str], WholeAnswer]


class _Endpoint:
    """The request handlers."""

    def __init__(self, sessions: EndpointSessions, *, model: str, max_body_bytes: int) -> None:
        self._sessions = sessions
        self._model = model
        self._max_body_bytes = max_body_bytes
        self._bodies = Bodies(_TOGETHER * max_body_bytes)
        self._started = int(time.time())

    async def complete(self, request: Request, api: Api) -> Response:
        session = self._session(request)
        with ExitStack() as slots:
            slots.enter_context(session.slot())
            body = await session.while_open(
                self._bodies.read(request, max_bytes=self._max_body_bytes)
            )
            # Only now: agents that send slowly take no slot of the others.
            slots.enter_context(self._sessions.slot())
            allowed = session.allowed.for_request()
            asked = await _read(session, partial(api.read, body, allowed, session), len(body))
            answer = api.answer(asked, session, self._model)
            gone = partial(_disconnected, request)
            if not asked.stream:
                turns = await session.complete(asked, gone=gone)
                if turns is None:
                    return Response(status_code=_CLIENT_GONE)
                session.record(answer.id, asked, turns, allowed)
                return JSONResponse(answer.whole(turns))
            assert isinstance(answer, AnswerWriter), "an API without streams refuses them"
            stream = EventStream(
                answer,
                lambda take: session.complete(asked, gone=gone, on_delta=take),
                while_open=session.while_open,
                slots=slots.pop_all(),
                finished=lambda turns: session.record(answer.id, asked, turns, allowed),
            )
            return stream if await stream.begun() else Response(status_code=_CLIENT_GONE)

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of a prompt as it would begin a conversation; nothing is recorded."""
        session = self._session(request)
        with session.slot():
            body = await session.while_open(
                self._bodies.read(request, max_bytes=self._max_body_bytes)
            )
            with self._sessions.slot():
                allowed = session.allowed.for_request()
                asked = await _read(
                    session, partial(_ANTHROPIC.read, body, allowed, session), len(body)
                )
                counting = session.captured.count_tokens(asked.messages, tools=asked.tools)
                try:
                    number = await session.while_open(counting)
                except AgentLoopError as error:
                    raise answer_to(error) from error
        return JSONResponse({"input_tokens": number})

    async def list_models(self, request: Request) -> Response:
        self._session(request)
        model = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "treadle",
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def take_reward(self, request: Request) -> Response:
        session = self._session(request)
        body = await session.while_open(self._bodies.read(request, max_bytes=SMALL))
        session.reward = read_reward(read_object(body))
        return JSONResponse({"reward": session.reward})

    def _session(self, request: Request) -> EndpointSession:
        return self._sessions.find(
            request.path_params["session_id"],
            request.headers.get("authorization", ""),
            request.headers.get("x-api-key", ""),
        )


def _chat_answer(asked: AgentRequest, session: EndpointSession, model: str) -> ChatAnswer:
    return ChatAnswer(
        id=f"chatcmpl-{session.id}-{session.next_answer()}",
        created=int(time.time()),
        model=model,
        request=asked,
        renderer=session.renderer,
    )


def _responses_answer(asked: AgentRequest, session: EndpointSession, model: str) -> ResponsesAnswer:
    return ResponsesAnswer(
        answer_id=f"resp_{session.id}_{session.next_answer()}",
        created=int(time.time()),
        model=model,
        request=asked,
        renderer=session.renderer,
    )


def _anthropic_answer(asked: AgentRequest, session: EndpointSession, model: str) -> AnthropicAnswer:
    return AnthropicAnswer(answer_id=f"msg_{session.id}_{session.next_answer()}", model=model)


_CHAT = Api(read=lambda body, allowed, _: read_request(body, allowed), answer=_chat_answer)
_RESPONSES = Api(
    read=lambda body, allowed, session: read_responses_request(body, allowed, session.answered),
    answer=_responses_answer,
)
_ANTHROPIC = Api(
    read=lambda body, allowed, _: read_anthropic_request(body, allowed), answer=_anthropic_answer
)
_TOKENS = Api(
    read=lambda body, allowed, _: read_token_request(body, allowed),
    answer=lambda asked, session, _: TokenAnswer(
        id=f"generate-{session.id}-{session.next_answer()}", request=asked
    ),
)
_APIS = {
    "/v1/chat/completions": _CHAT,
    "/v1/responses": _RESPONSES,
    _MESSAGES: _ANTHROPIC,
    "/inference/v1/generate": _TOKENS,
}


async def _read(session: EndpointSession, read: Callable[[], T], size: int) -> T:
    if size < _LONG:
        return read()
    return await session.while_open(asyncio.to_thread(read))


async def _disconnected(request: Request) -> None:
    """Waits for the client to disconnect; nothing else can come after the body."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _written(request, error)


async def _answer_unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    unknown = ApiError(
        f"{request.method} {request.url.path} is not served here; served are "
        "chat/completions, responses, messages and models below /sessions/<id>/v1, and "
        "/sessions/<id>/reward",
        status=error.status_code,
        code="not_found",
    )
    return _written(request, unknown, error.headers)


async def _answer_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _answer_bug(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    bug = ApiError(
        f"internal error: {type(error).__name__}; see the log of the endpoint",
        status=500,
        code="internal_error",
    )
    return _written(request, bug)


def _written(
    request: Request, error: ApiError, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns an error in the format of the API that the address belongs to."""
    anthropic = f"{_MESSAGES}/" in f"{request.url.path}/"
    body = error_body(error) if anthropic else error.body
    return JSONResponse(
        body, status_code=error.status, headers={**error.headers, **(headers or {})}
    )
