import asyncio
import contextlib
import socket

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from treadle.agent_loop.proxy import server
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
        async with asyncio.timeout(60):
            answer = await reader.readline()
        assert answer == b"HTTP/1.1 400 Bad Request\r\n"
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.asyncio
async def test_a_head_that_does_not_arrive_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the first one, byte by byte or not at all, nor one after an answer."""

    async def first(_: Request) -> Response:
        monkeypatch.setattr(server, "HEAD_S", 0.2)  # Only now: a slow machine may send it late.
        return Response("done")

    app = Starlette(routes=[Route("/", first)])
    async with SharedServer(app, host="127.0.0.1", port=0) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        for begun in (b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"):
            whole = begun.endswith(b"\r\n\r\n")
            monkeypatch.setattr(server, "HEAD_S", 60.0 if whole else 0.2)
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun)
            async with asyncio.timeout(60):
                if whole:
                    await reader.readuntil(b"\r\n\r\ndone")
                    writer.write(b"GET /")
                else:
                    for byte in begun:
                        writer.write(bytes([byte]))
                assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
                assert b"did not arrive in 0.2 s" in await reader.read()
            writer.close()


@pytest.mark.asyncio
async def test_an_answer_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.05)

    begun = asyncio.Event()

    async def slow(_: Request) -> Response:
        begun.set()
        await asyncio.sleep(0.2)  # Longer than the limit, which is what is tested.
        return Response("done")

    app = Starlette(routes=[Route("/", slow)])
    async with SharedServer(app, host="127.0.0.1", port=0) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        async with asyncio.timeout(60):
            while True:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                answer = await reader.readline()
                if begun.is_set():  # Else a slow machine sent the head itself too late.
                    break
                writer.close()
            assert answer.startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"done")
        writer.close()
