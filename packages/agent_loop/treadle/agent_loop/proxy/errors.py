"""Errors of the endpoint: what went wrong, in the shape that OpenAI's clients read.

Invariant: every failed request is answered with one of these; nothing of ours leaves as a trace.
OpenAI's clients try again by themselves after 408, 409, 429 and 5xx, and give up after other 4xx;
so a status says whether the same request, sent again, may succeed. Sending it again is safe: a
request that failed has left no trace in its session.

| Status | code | Meaning |
|---|---|---|
| 400 | invalid_value, unsupported_parameter | the request; `param` names the place |
| 400 | context_length_exceeded | a limit on lengths; compacting the history may help |
| 400 | turn_limit_reached | a limit on turns; the session is used up |
| 401 | invalid_api_key | the session's own key is needed |
| 404 | session_not_found | never opened, or over |
| 413 | request_too_large | the body |
| 429 | rate_limit_exceeded | too many requests under way, here or at the servers |
| 500 | internal_error | a bug of ours |
| 502, 503, 504 | engine_failed, unavailable, timeout | the servers behind |
"""

from dataclasses import dataclass

from treadle.agent_loop.capture import LimitReachedError, SessionEndedError
from treadle.agent_loop.errors import (
    AgentLoopError,
    GenerationTimeoutError,
    OverloadedError,
    PromptTooLongError,
    RenderError,
    ReplicaUnavailableError,
    WeightVersionBehindError,
)
from treadle.agent_loop.types import StopReason

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
_LENGTHS = (StopReason.RESPONSE_LENGTH, StopReason.CONTEXT_LENGTH)


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        code: What went wrong, for programs.
        param: The place in the request.
        retry_after_s: When to try again; None: whenever.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, object]:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _TYPES[400])
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer. Whole seconds for everyone, milliseconds for OpenAI's clients."""
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(max(1, round(self.retry_after_s))),
            "retry-after-ms": str(round(self.retry_after_s * 1000)),
        }


def bad_value(param: str, message: str) -> ApiError:
    """A value that is not accepted."""
    return ApiError(f"{param}: {message}", status=400, code="invalid_value", param=param)


def unsupported(param: str, message: str) -> ApiError:
    """A parameter that is not known, or not in this way."""
    return ApiError(f"{param}: {message}", status=400, code="unsupported_parameter", param=param)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    code: str
    retry_after_s: float | None = None


_ANSWERS: tuple[tuple[type[AgentLoopError], _Answer], ...] = (
    (SessionEndedError, _Answer(404, "session_not_found")),
    (PromptTooLongError, _Answer(400, "context_length_exceeded")),
    (RenderError, _Answer(400, "invalid_value")),
    (OverloadedError, _Answer(429, "rate_limit_exceeded", 1.0)),
    (ReplicaUnavailableError, _Answer(503, "unavailable", 1.0)),
    (WeightVersionBehindError, _Answer(503, "unavailable", 1.0)),
    (GenerationTimeoutError, _Answer(504, "timeout")),
    (AgentLoopError, _Answer(502, "engine_failed")),
)


def answer_to(error: AgentLoopError) -> ApiError:
    """What a failed completion is answered with."""
    if isinstance(error, LimitReachedError):
        length = error.stop in _LENGTHS
        code = "context_length_exceeded" if length else "turn_limit_reached"
        return ApiError(str(error), status=400, code=code)
    answer = next(answer for kind, answer in _ANSWERS if isinstance(error, kind))
    return ApiError(
        str(error), status=answer.status, code=answer.code, retry_after_s=answer.retry_after_s
    )
