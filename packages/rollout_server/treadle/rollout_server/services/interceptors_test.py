import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
import pytest

from treadle.rollout_server.services.interceptors import Guard


class Context:
    """Of a call whose memory gRPC frees when it ends."""

    def __init__(self) -> None:
        self.ended = False

    def peer(self) -> str:
        assert not self.ended, "gRPC would read freed memory here, and crash"
        return "ipv4:127.0.0.1:5"

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
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
