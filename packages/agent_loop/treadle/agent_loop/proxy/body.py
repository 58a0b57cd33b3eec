"""Reads the bodies of requests, with limits of size and of time.

Invariant: of one body at most its limit is kept in memory, and one part more; of all bodies that
are not complete at most the limit of `Bodies`; and none for longer than `BODY_S`.

The reader waits for the client.
"""

import asyncio

from starlette.requests import Request

from treadle.agent_loop.proxy.errors import ApiError, busy

SMALL = 1 << 20
"""Maximum number of bytes of a request without messages."""
BODY_S = 60.0
"""Seconds in which a whole body must arrive."""


class Bodies:
    """The bodies that one endpoint reads.

    Args:
        max_bytes: Maximum for all bodies that have not arrived completely.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arrived = 0

    async def read(self, request: Request, *, max_bytes: int) -> bytes:
        """Reads a whole body.

        Raises:
            ApiError: The body is too long, or takes too long, or too many others are under way.
            ClientDisconnect: The client disconnected before the end.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    body += part
                    self._arrived += len(part)
                    self._check(len(body), max_bytes)
        except TimeoutError:
            raise ApiError(
                f"only {len(body)} bytes of the request came in {BODY_S:g} s; "
                "send it again, faster",
                status=408,
                code="request_timeout",
            ) from None
        finally:
            self._arrived -= len(body)
        return bytes(body)

    def _check(self, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            raise ApiError(
                f"the request is longer than {max_bytes} bytes",
                status=413,
                code="request_too_large",
            )
        if self._arrived > self._max_bytes:
            raise busy(
                f"requests that are not complete have {self._arrived} bytes here, and the limit "
                f"is {self._max_bytes}"
            )
