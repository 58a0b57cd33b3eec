"""Errors of the endpoint, in the format of OpenAI's API.

Invariant: every failed request is answered with one of these, never with a stack trace. OpenAI's
clients retry after 408, 409, 429 and 5xx, and give up after other 4xx; so the status shows whether
a retry may succeed. A retry is safe, because a failed request leaves no trace in its session.

| Status | code | Meaning |
|---|---|---|
| 400 | invalid_value, unsupported_parameter | the request; `param` names the place |
| 400 | context_length_exceeded | a limit on lengths; compacting the history may help |
| 400 | turn_limit_reached | a limit on turns; the session is used up |
| 401 | invalid_api_key | the session's own key is required |
| 404 | session_not_found | the session was never opened, or is over |
| 413 | request_too_large | the body is too large, or has too many values |
| 429 | rate_limit_exceeded | too many in-flight requests, here or at the servers |
| 500 | internal_error | a bug of the endpoint |
| 502, 503, 504 | engine_failed, unavailable, timeout | a failure of the rollout servers |
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
_RETRY_AFTER_S = 1.0
_LENGTHS = (StopReason.RESPONSE_LENGTH, StopReason.CONTEXT_LENGTH)


class ApiError(Exception):
    """An error answer to a request.

    Attributes:
        code: Kind of the error, for programs.
        param: The part of the request that is wrong.
        retry_after_s: When to retry; None means any time.
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
        """The headers of the answer: seconds as in HTTP, milliseconds for OpenAI's clients."""
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(max(1, round(self.retry_after_s))),
            "retry-after-ms": str(round(self.retry_after_s * 1000)),
        }


def busy(message: str) -> ApiError:
    """Returns the error for a request without a slot."""
    return ApiError(message, status=429, code="rate_limit_exceeded", retry_after_s=_RETRY_AFTER_S)


def bad_value(param: str, message: str) -> ApiError:
    """Returns the error for an invalid value."""
    return ApiError(f"{param}: {message}", status=400, code="invalid_value", param=param)


def unsupported(param: str, message: str) -> ApiError:
    """Returns the error for an unsupported parameter or value."""
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
    """Returns the error answer for a failed completion."""
    if isinstance(error, LimitReachedError):
        length = error.stop in _LENGTHS
        code = "context_length_exceeded" if length else "turn_limit_reached"
        return ApiError(str(error), status=400, code=code)
    answer = next(answer for kind, answer in _ANSWERS if isinstance(error, kind))
    return ApiError(
        str(error), status=answer.status, code=answer.code, retry_after_s=answer.retry_after_s
    )
