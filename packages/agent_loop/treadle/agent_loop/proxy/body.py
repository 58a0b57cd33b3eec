"""Reads the body of a request with a size limit.

Invariant: at most the limit, and one part of the body, is kept in memory.

The reader waits for the client; the caller must set a time limit.
"""

from starlette.requests import Request

from treadle.agent_loop.proxy.errors import ApiError

SMALL = 1 << 20
"""Maximum number of bytes of a request without messages."""


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Reads the whole body.

    Raises:
        ApiError: The body is too long.
        ClientDisconnect: The client disconnected before the end.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise ApiError(
                f"the request is longer than {max_bytes} bytes",
                status=413,
                code="request_too_large",
            )
        parts.append(part)
    return b"".join(parts)
