import asyncio
import contextlib
import stat
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio
import pytest

from treadle.agent_loop.rpc.driven import DrivenAccess, DrivenProgram, serve_driver
from treadle.trainer.launch.run_tls import RunTls, run_tls, write_private

_Method: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"


class _Echo(grpc.GenericRpcHandler):
    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def echo(request: bytes, context: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


async def _answer(program: RunTls, driver: DrivenAccess) -> bytes:
    """Returns what a program of a run answers to a driver who has its token."""
    served = DrivenProgram(
        host="127.0.0.1",
        token=driver.token,
        ready_file=program.directory / ".ready",
        tls=program.directory,
    )
    async with serve_driver(served, lambda s: s.add_generic_rpc_handlers((_Echo(),))) as address:
        host, _, port = address.rpartition(":")
        _, silent = await asyncio.open_connection(host, int(port))  # it delays nobody
        security = driver.channels()
        with contextlib.closing(silent):
            async with security.open(address) as channel:
                echo: _Method = channel.unary_unary("/test/Echo")
                return await echo(b"hello", metadata=security.metadata, timeout=30)


@pytest.mark.asyncio
async def test_only_processes_of_the_run_hear_each_other(tmp_path: Path) -> None:
    with run_tls(tmp_path / "one") as one, run_tls(tmp_path / "other") as other:
        assert await _answer(one, DrivenAccess(tls=one.directory)) == b"hello"
        for driver in (DrivenAccess(tls=other.directory), DrivenAccess()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _answer(one, driver)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.asyncio
async def test_the_files_are_private_and_end_with_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    directory.mkdir()
    (directory / "key.pem").write_text("of a run that was killed")
    (directory / "key.pem").chmod(0o644)
    with run_tls(directory) as tls:
        assert sorted(tls.read()) == [tls.certificate, tls.key, tls.roots]
        assert {stat.S_IMODE(path.stat().st_mode) for path in tls.read()} == {0o600}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert b"PRIVATE" in tls.key.read_bytes()
        on_a_node = RunTls(tmp_path / "node")
        for path, content in tls.read().items():
            copy = on_a_node.directory / path.name
            write_private(copy, content)
            before = copy.stat().st_ino
            write_private(copy, content)
            assert copy.stat().st_ino == before  # a second process there leaves it alone
        assert await _answer(on_a_node, DrivenAccess(tls=tls.directory)) == b"hello"
    assert not directory.exists()
