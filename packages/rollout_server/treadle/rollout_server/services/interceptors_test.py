import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout_server.services.interceptors import Guard
from treadle.rollout_server.services.methods import Methods


class Context:
    """Of a call whose memory gRPC frees when it ends."""

    def __init__(self) -> None:
        self.ended = False

    def peer(self) -> str:
        assert not self.ended, "gRPC would read freed memory here, and crash"
        return "ipv4:127.0.0.1:5"

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: object
    ) -> NoReturn:
        self.aborted = (code, details)
        raise grpc.aio.AbortError

    def time_remaining(self) -> float:
        return 1.0


@pytest.mark.asyncio
async def test_an_ended_call_is_logged_without_asking_grpc(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answers(request: str, context: Any) -> AsyncIterator[str]:
        yield request
        yield request

    async def find(details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(cast("Any", answers))

    method = "/treadle.rollout.v1.GenerationService/Generate"
    details: Any = SimpleNamespace(method=method, invocation_metadata=())
    handler: Any = await Guard(None).intercept_service(find, details)
    context = Context()
    with caplog.at_level(logging.DEBUG):
        stream = handler.unary_stream("a", context)
        assert await anext(stream) == "a"
        context.ended = True
        await stream.aclose()
    assert f"ipv4:127.0.0.1:5 {method} cancelled" in caplog.text


@pytest.mark.asyncio
async def test_a_bug_is_logged_and_its_text_stays_here(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks(request: str, context: Any) -> str:
        raise KeyError("the secret")

    async def find(details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(cast("Any", breaks))

    method = "/treadle.rollout.v1.ServerService/Pause"
    details: Any = SimpleNamespace(method=method, invocation_metadata=())
    handler: Any = await Guard(None).intercept_service(find, details)
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await handler.unary_unary("a", context)
    code, text = context.aborted
    assert code is grpc.StatusCode.INTERNAL
    assert text == "KeyError: a bug of the server, whose log has the trace"
    assert f"a bug in {method}" in caplog.text and "the secret" in caplog.text


@pytest.mark.asyncio
async def test_a_write_to_a_caller_who_has_gone_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    async def writes(request: str, context: Any) -> str:
        raise grpc.aio.InternalError("the stream has ended")

    async def find(details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(cast("Any", writes))

    details: Any = SimpleNamespace(method="/treadle.rollout.v1.X/Y", invocation_metadata=())
    handler: Any = await Guard(None).intercept_service(find, details)
    with pytest.raises(grpc.aio.InternalError):
        await handler.unary_unary("a", Context())
    assert not caplog.text


METHOD = "/treadle.rollout.v1.GenerationService/Generate"
RIGHT = (("authorization", "Bearer s3cret"),)


@asynccontextmanager
async def echo(token: str | None = None) -> AsyncIterator[tuple[Any, list[bytes]]]:
    """Serves a method that returns its request, and notes what is decoded."""
    decoded: list[bytes] = []

    def decode(raw: bytes) -> gen.GenerateRequest:
        decoded.append(raw)
        return gen.GenerateRequest.FromString(raw)

    async def answer(request: gen.GenerateRequest, context: Any) -> gen.GenerateRequest:
        return request

    async def last(requests: AsyncIterator[gen.GenerateRequest], context: Any) -> Any:
        return [request async for request in requests][-1]

    async def each(requests: AsyncIterator[gen.GenerateRequest], context: Any) -> Any:
        async for request in requests:
            yield request

    encode = gen.GenerateRequest.SerializeToString
    methods = Methods()
    methods.add_registered_method_handlers(
        "treadle.rollout.v1.GenerationService",
        {
            "Generate": grpc.unary_unary_rpc_method_handler(cast("Any", answer), decode, encode),
            "Last": grpc.stream_unary_rpc_method_handler(cast("Any", last), decode, encode),
            "Each": grpc.stream_stream_rpc_method_handler(cast("Any", each), decode, encode),
        },
    )
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), methods)
    server = grpc.aio.server(interceptors=(Guard(token),))
    server.add_generic_rpc_handlers((methods,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, decoded
    finally:
        await server.stop(None)


@pytest.mark.asyncio
async def test_nothing_of_a_caller_without_the_token_is_decoded() -> None:
    message = gen.GenerateRequest(request_id="r").SerializeToString()
    async with echo("s3cret") as (channel, decoded):
        wrong = ("authorization", "Bearer wrong")
        for metadata in ((), (wrong,), (wrong, *RIGHT), (*RIGHT, wrong)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(METHOD)(message, timeout=60, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError, match="a deadline"):
            await channel.unary_unary(METHOD)(message, metadata=RIGHT)
        assert decoded == []
        assert await channel.unary_unary(METHOD)(message, timeout=60, metadata=RIGHT) == message
        assert decoded == [message]


@pytest.mark.asyncio
async def test_a_caller_without_the_token_is_refused_before_the_message_is_read() -> None:
    async with echo("s3cret") as (channel, _):
        call = channel.stream_unary(METHOD)(timeout=60)  # A stream, so that no message is sent.
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.asyncio
async def test_a_message_that_does_not_parse_is_the_callers_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = gen.GenerateRequest(request_id="r").SerializeToString()
    junk = b"\xff" * 20

    async def refused(call: Any) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return error.value.details() or ""

    async with echo() as (channel, _):
        text = await refused(channel.unary_unary(METHOD)(junk, timeout=60))
        expected = f"expected the serialized request message of {METHOD}"
        assert text == f"request is 20 bytes that do not parse, {expected}"
        last = METHOD.replace("Generate", "Last")
        assert "20 bytes" in await refused(channel.stream_unary(last)([whole, junk], timeout=60))
        assert await channel.stream_unary(last)([b"", whole], timeout=60) == whole
        each = channel.stream_stream(METHOD.replace("Generate", "Each"))
        call = each([whole, junk], timeout=60)
        assert await call.read() == whole
        assert "20 bytes" in await refused(call.read())
    assert not caplog.records


@pytest.mark.asyncio
async def test_health_takes_no_large_message_and_answers_what_it_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def code(method: str, message: bytes) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary(f"/grpc.health.v1.Health/{method}")(message, timeout=60)
        return error.value.code()

    async with echo("s3cret") as (channel, _):
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"", timeout=60)
        assert await code("Check", b"\xff" * 20) is grpc.StatusCode.INVALID_ARGUMENT
        large = health_pb2.HealthCheckRequest(service="s" * 2000).SerializeToString()
        assert await code("Check", large) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code("Check", b"\n\1x") is grpc.StatusCode.NOT_FOUND
        assert await code("List", b"") is grpc.StatusCode.UNIMPLEMENTED
    assert not caplog.records
