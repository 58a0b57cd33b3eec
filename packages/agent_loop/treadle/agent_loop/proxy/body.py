"""The body of a request, bounded.

Invariant: no more than the bound is ever held of it.

The reader waits for the client to send; who calls says until when.
"""

from starlette.requests import Request

from treadle.agent_loop.proxy.errors import ApiError

SMALL = 1 << 20
"""Bytes of a request that has no messages."""


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Reads the whole body.

    Raises:
        ApiError: It is longer.
        ClientDisconnect: The client went before its end.
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
