import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.rpc.security import CHANNEL_OPTIONS, ChannelSecurity


@contextlib.asynccontextmanager
async def _silent(called: asyncio.Event) -> AsyncIterator[str]:
    """A server that never answers `/test/Wait`."""

    async def wait(request: bytes, context: object) -> bytes:
        called.set()
        await asyncio.get_running_loop().create_future()
        return request

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def _network(
    address: str, broken: asyncio.Event, *, open_s: float = 0.0
) -> AsyncIterator[str]:
    """A way to a server that drops everything, and says nothing, once it is broken.

    A connection carries nothing for its first `open_s`.
    """
    host, _, port = address.rpartition(":")
    pipes: set[asyncio.Task[None]] = set()

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if not broken.is_set():
                target.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(open_s)
        there, back = await asyncio.open_connection(host, int(port))
        pipes.add(asyncio.create_task(forward(reader, back)))
        pipes.add(asyncio.create_task(forward(there, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_server_that_falls_silent_is_noticed_before_the_deadline() -> None:
    waits = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    assert waits < dict(CHANNEL_OPTIONS).keys()
    options = tuple((k, 50 if k in waits else value) for k, value in CHANNEL_OPTIONS)
    called, broken = asyncio.Event(), asyncio.Event()
    async with (
        _silent(called) as server,
        _network(server, broken) as address,
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        wait: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/Wait")
        arrived = asyncio.ensure_future(called.wait())
        while not called.is_set():  # On a slow machine a network that is well looks silent, too.
            call = asyncio.ensure_future(wait(b"", timeout=60, wait_for_ready=True))
            await asyncio.wait([call, arrived], return_when=asyncio.FIRST_COMPLETED)
        broken.set()
        with pytest.raises(grpc.RpcError) as caught:
            await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.asyncio
async def test_a_connection_that_opens_slowly_is_waited_for() -> None:
    called = asyncio.Event()
    async with (
        _silent(called) as server,
        _network(server, asyncio.Event(), open_s=0.5) as address,
        ChannelSecurity().open(address) as channel,
    ):
        wait: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/Wait")
        call = asyncio.ensure_future(wait(b"", timeout=60))
        arrived = asyncio.ensure_future(called.wait())
        await asyncio.wait([call, arrived], return_when=asyncio.FIRST_COMPLETED)
        assert arrived.done(), call.exception()
        call.cancel()


def test_a_token_does_not_leave_the_machine_in_plain_text() -> None:
    plain = ChannelSecurity(token="secret")
    for open_channel in (plain.open, plain.open_blocking):
        with pytest.raises(SetupError, match=r"the token for 10\.0\.0\.1:80 would travel in plain"):
            open_channel("10.0.0.1:80")
    plain.open_blocking("127.0.0.1:80").close()
    ChannelSecurity(token="secret", tls=True).open_blocking("10.0.0.1:80").close()
