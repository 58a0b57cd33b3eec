import asyncio
import contextlib
import socket

import pytest
from starlette.applications import Starlette

from treadle.agent_loop.proxy.server import SharedServer


@pytest.mark.asyncio
async def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted: list[socket.socket] = []
    accept = socket.socket.accept

    def noting(listener: socket.socket) -> tuple[socket.socket, object]:
        connection, address = accept(listener)
        accepted.append(connection)
        return connection, address

    monkeypatch.setattr(socket.socket, "accept", noting)
    async with SharedServer(Starlette(), host="127.0.0.1", port=0) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.readline()
        (connection,) = accepted
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()


@pytest.mark.asyncio
@pytest.mark.parametrize("head", [b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\na: "])
async def test_a_head_without_end_is_refused(head: bytes) -> None:
    async with SharedServer(Starlette(), host="127.0.0.1", port=0) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b"x" * (1 << 17))
        async with asyncio.timeout(20):
            answer = await reader.readline()
        assert answer == b"HTTP/1.1 400 Bad Request\r\n"
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
