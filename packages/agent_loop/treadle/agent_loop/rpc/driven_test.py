import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio
import pytest

from treadle.agent_loop.rpc import driven
from treadle.agent_loop.rpc.driven import DrivenAccess, DrivenProgram, serve_driver, start_driven

_Method: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class _Echo(grpc.GenericRpcHandler):
    """Answers `/test/Echo`, and keeps what it decodes."""

    def __init__(self) -> None:
        self.decoded: list[bytes] = []

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def echo(request: bytes, context: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo, self._decode)

    def _decode(self, raw: bytes) -> bytes:
        self.decoded.append(raw)
        return raw


@contextlib.asynccontextmanager
async def _served(directory: Path) -> AsyncIterator[tuple[DrivenAccess, _Echo, str]]:
    access, echo = DrivenAccess(), _Echo()
    ready = directory / "ready"
    program = DrivenProgram(host="127.0.0.1", token=access.token, ready_file=ready)
    async with serve_driver(program, lambda s: s.add_generic_rpc_handlers((echo,))) as address:
        assert json.loads(ready.read_text())["address"] == address
        yield access, echo, address


async def _call(access: DrivenAccess, address: str, message: bytes = b"hello") -> bytes:
    security = access.channels()
    async with security.open(address) as channel:
        echo: _Method = channel.unary_unary("/test/Echo")
        return await echo(message, metadata=security.metadata, timeout=60)


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", _PREFACE, _PREFACE + _SETTINGS])
async def test_who_makes_no_call_delays_nobody_and_is_cut_off(
    said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driven, "_SILENT_MS", 50)
    async with _served(tmp_path) as (access, _, address):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        assert await _call(access, address) == b"hello"
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()  # to the end of the connection
        writer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("before", "problem"),
    [(True, "a wrong token"), (False, "a wrong token"), (None, "no token")],
    ids=["a wrong one before the right one", "after it", "none"],
)
async def test_a_message_of_a_stranger_is_not_decoded(
    before: bool | None, problem: str, tmp_path: Path
) -> None:
    async with (
        _served(tmp_path) as (access, echo, address),
        grpc.aio.insecure_channel(address) as c,
    ):
        wrong = ("authorization", "Bearer another")
        right = tuple(access.channels().metadata)
        metadata = () if before is None else (wrong, *right) if before else (*right, wrong)
        method: _Method = c.unary_unary("/test/Echo")
        with pytest.raises(grpc.aio.AioRpcError, match=problem) as refused:
            await method(bytes(1 << 20), metadata=metadata, timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert echo.decoded == []
        assert await _call(access, address) == b"hello"


def test_a_program_without_a_token_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(driven.TOKEN_VARIABLE, raising=False)
    arguments = ["--host", "127.0.0.1", "--ready_file", "ready"]
    with pytest.raises(SystemExit):
        start_driven(arguments, module="treadle.policy.rank")
    assert "TREADLE_RUN_TOKEN is not set: only the trainer starts" in capsys.readouterr().err
