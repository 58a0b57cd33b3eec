"""A server refuses a stream while it is sent; plain `grpc.aio` loses its status every time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from treadle.conformance.client.request_stream import RequestStream

MANY = [bytes(1 << 16)] * 64


async def _refuse(requests: AsyncIterator[bytes], context: Any) -> bytes:
    await anext(requests)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no such update", (("why", "x"),))
    return b""


async def _answer_one(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    yield await anext(requests)
    await _refuse(requests, context)


@pytest_asyncio.fixture
async def channel() -> AsyncIterator[Any]:
    handlers: dict[str, Any] = {
        "Push": grpc.stream_unary_rpc_method_handler(_refuse),
        "Exchange": grpc.stream_stream_rpc_method_handler(_answer_one),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def assert_refused(caught: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> None:
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == "no such update"
    assert dict(caught.value.trailing_metadata() or ()) == {"why": "x"}


@pytest.mark.asyncio
async def test_a_call_says_why_it_was_refused_while_its_stream_is_sent(
    channel: Any,
) -> None:
    for _ in range(50):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await RequestStream(channel.stream_unary("/test/Push")(MANY, timeout=60))
        assert_refused(caught)


@pytest.mark.asyncio
async def test_a_write_says_why_the_call_was_refused(channel: Any) -> None:
    for _ in range(50):
        call = RequestStream(channel.stream_unary("/test/Push")(timeout=60))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            with suppress(asyncio.InvalidStateError):  # It ended between two writes.
                for message in MANY:
                    await call.write(message)
            await call
        assert_refused(caught)


@pytest.mark.asyncio
async def test_answers_come_before_the_refusal(channel: Any) -> None:
    for _ in range(50):
        answers = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for answer in RequestStream(channel.stream_stream("/test/Exchange")(MANY)):
                answers.append(answer)
        assert answers == MANY[:1]
        assert_refused(caught)


@pytest.mark.asyncio
async def test_a_read_says_why_the_call_was_refused(channel: Any) -> None:
    call = RequestStream(channel.stream_stream("/test/Exchange")(timeout=60))
    await call.write(b"one")
    assert await call.read() == b"one"
    await call.write(b"two")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert_refused(caught)
    assert call.done()
