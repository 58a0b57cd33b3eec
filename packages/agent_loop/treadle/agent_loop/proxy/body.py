"""Reads the body of a request with a size limit and a time limit.

Invariant: at most the limit, and one part of the body, is kept in memory, and for no longer than
`BODY_S` while the body is incomplete.

The reader waits for the client.
"""

import asyncio

from starlette.requests import Request

from treadle.agent_loop.proxy.errors import ApiError

SMALL = 1 << 20
"""Maximum number of bytes of a request without messages."""
BODY_S = 60.0
"""Seconds in which a whole body must arrive."""


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Reads the whole body.

    Raises:
        ApiError: The body is too long, or takes too long.
        ClientDisconnect: The client disconnected before the end.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise ApiError(
                        f"the request is longer than {max_bytes} bytes",
                        status=413,
                        code="request_too_large",
                    )
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            f"only {size} bytes of the request came in {BODY_S:g} s; send it again, faster",
            status=408,
            code="request_timeout",
        ) from None
    return b"".join(parts)
