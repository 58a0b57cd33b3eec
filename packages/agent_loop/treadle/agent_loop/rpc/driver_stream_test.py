"""The stream between a driver and its program, over real gRPC; its messages are numbers here."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as Frame

from treadle.agent_loop.rpc.driven import DrivenAccess, DrivenProgram, serve_driver_in_threads
from treadle.agent_loop.rpc.driver_stream import DriverEnd, ProgramEnd

pytestmark = pytest.mark.asyncio

METHOD = "/treadle.test.Numbers/Work"
BEAT = 255


def split(frame: Frame) -> list[int]:
    return list(frame.value)


def join(numbers: Any) -> Frame:
    return Frame(value=bytes(numbers))


def serve(program: ProgramEnd) -> Callable[[grpc.Server], None]:
    handler = grpc.stream_stream_rpc_method_handler(
        program.serve, Frame.FromString, Frame.SerializeToString
    )

    def add(server: grpc.Server) -> None:
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("treadle.test.Numbers", {"Work": handler})]
        )

    return add


def method(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(METHOD, Frame.SerializeToString, Frame.FromString)


@dataclass
class Ends:
    """Both ends, and what each has got."""

    program: ProgramEnd
    driver: DriverEnd
    at_program: "asyncio.Queue[int | str]" = field(default_factory=asyncio.Queue)
    at_driver: "asyncio.Queue[int | str]" = field(default_factory=asyncio.Queue)


@asynccontextmanager
async def connected(
    tmp_path: Path, *, token: str | None = None, beat_s: float = 1000.0, beats: Any = None
) -> AsyncIterator[Ends]:
    at_program: asyncio.Queue[int | str] = asyncio.Queue()
    at_driver: asyncio.Queue[int | str] = asyncio.Queue()

    def beat() -> int:
        if beats is not None:
            beats.put(BEAT)
        return BEAT

    program = ProgramEnd(
        split=split,
        join=join,
        on_message=at_program.put_nowait,
        on_end=lambda: at_program.put_nowait("end"),
        beat=beat,
        beat_s=beat_s,
    )
    access = DrivenAccess()
    served = DrivenProgram(
        host="127.0.0.1", token=token or access.token, ready_file=tmp_path / "ready"
    )
    with serve_driver_in_threads(served, serve(program)) as address:
        driver = DriverEnd(
            access,
            address,
            method,
            split=split,
            join=join,
            on_message=at_driver.put_nowait,
            on_end=lambda problem: at_driver.put_nowait(f"end: {problem}"),
        )
        yield Ends(program, driver, at_program, at_driver)
        program.close()
        await driver.aclose()


async def taken(source: "asyncio.Queue[int | str]", count: int) -> list[int | str]:
    return [await source.get() for _ in range(count)]


async def test_messages_arrive_in_their_order_and_then_the_end(tmp_path: Path) -> None:
    numbers = [*range(100), 0, 1]
    async with connected(tmp_path) as ends:
        assert await ends.at_driver.get() == BEAT
        for number in numbers:
            ends.driver.send(number)
            ends.program.send(number)
        assert await taken(ends.at_program, len(numbers)) == numbers
        assert await taken(ends.at_driver, len(numbers)) == numbers
        ends.program.send(7)
        ends.program.close()
        assert await taken(ends.at_driver, 2) == [7, "end: None"]
        assert await ends.at_program.get() == "end"


async def test_a_program_gives_signs_of_life_while_its_event_loop_stands_still(
    tmp_path: Path,
) -> None:
    beats: queue.SimpleQueue[int] = queue.SimpleQueue()
    async with connected(tmp_path, beat_s=0.01, beats=beats) as ends:
        assert await ends.at_driver.get() == BEAT
        for _ in range(3):
            beats.get(timeout=60)  # as a user's code, which nobody can interrupt


async def test_a_caller_without_the_token_is_refused(tmp_path: Path) -> None:
    async with connected(tmp_path, token="another") as ends:
        problem = await ends.at_driver.get()
        assert problem == "end: ended its connection: UNAUTHENTICATED: the call has a wrong token"
        assert ends.at_program.empty()


async def test_a_message_that_cannot_be_read_ends_the_stream_with_what_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(tmp_path) as ends:
        assert await ends.at_driver.get() == BEAT

        def refuse(number: int) -> None:
            raise KeyError(number)

        ends.driver._on_message = refuse
        ends.program.send(1)
        assert await ends.at_driver.get() == "end: sent what cannot be read here: KeyError: 1"
        assert await ends.at_program.get() == "end"
    assert "cannot be read" in caplog.text
