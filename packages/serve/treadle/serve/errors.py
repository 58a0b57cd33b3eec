"""Errors as the SDK reads them: a status of HTTP, or the category of a future that failed."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Limits", "ServiceError", "gone", "refused", "unknown"]


class ServiceError(Exception):
    """A request cannot be answered; the message names the cause, the value and the fix.

    Attributes:
        status: Status of HTTP, where the error is found before the request is accepted. The SDK
            repeats 408, 409, 429 and those from 500 on.
        category: Owner of the fault, for a future that fails with it.
    """

    def __init__(
        self, message: str, *, status: int = 400, category: Literal["user", "server"] = "user"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.category = category


def refused(what: str, instead: str) -> ServiceError:
    """Returns the error about something that is not served, and what to do instead."""
    return ServiceError(f"treadle serve has no {what}: {instead}")


def unknown(what: str, value: object, fix: str) -> ServiceError:
    """Returns the error about something that does not exist."""
    return ServiceError(f"there is no {what} {value!r}: {fix}", status=404)


def gone(what: str, value: object, fix: str) -> ServiceError:
    """Returns the error about something that no longer exists, with the way to replace it."""
    return ServiceError(f"{what} {value!r} is gone: {fix}", status=410)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a service has room for, and how much of it one session may have.

    Attributes:
        session_requests: Maximum number to train, and to sample, that are not answered. Of those
            to train, the ones that wait for an earlier number to come are not counted.
    """

    models: int
    session_models: int
    session_requests: int

    def check_requests(self, session: str, in_flight: int) -> None:
        """Raises `ServiceError`, which the SDK answers by asking again later, if it is too much."""
        if in_flight >= self.session_requests:
            raise ServiceError(
                f"session {session} has {in_flight} requests in flight, as many as "
                "--max-session-requests: wait for answers",
                status=429,
            )
