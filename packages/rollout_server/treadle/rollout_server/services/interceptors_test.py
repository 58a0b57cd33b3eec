import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

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
