import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from treadle.agent_loop import SetupError
from treadle.tools.sandbox import (
    Execution,
    Program,
    RunStatus,
    SandboxBusyError,
    SandboxError,
    UnsupportedProgramError,
)
from treadle.tools.sandbox.fusion import FusionSandbox
from treadle.tools.sandbox.wire import encode_failure, encode_response

pytestmark = pytest.mark.asyncio

PROGRAM = Program(code="print(1)", timeout_s=30)
Reply = tuple[int, dict[str, str], object]


def ran(stdout: str) -> Reply:
    execution = Execution(
        status=RunStatus.FINISHED, stdout=stdout, stderr="", return_code=0, execution_s=0.1
    )
    return 200, {}, encode_response(execution)


HEALTHY = ran("42\n")


@dataclass
class ScriptedServer:
    """Answers in order; None breaks the connection off, `hold` waits for the client to."""

    replies: list[Reply | None]
    requests: list[dict[str, object]] = field(default_factory=list)
    hold: bool = False
    held: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(
                    line.lower().split(": ", 1) for line in head.decode().splitlines()[1:-1]
                )
                body = await reader.readexactly(int(fields["content-length"]))
                self.requests.append(json.loads(body))
                if self.hold and len(self.requests) > 1:
                    self.held.set()
                    await reader.read()
                    self.hung_up.set()
                    return
                reply = self.replies.pop(0)
                if reply is None:
                    return
                status, headers, answer = reply
                text = json.dumps(answer).encode()
                headers = {**headers, "content-length": str(len(text))}
                lines = [f"HTTP/1.1 {status} X", *(f"{k}: {v}" for k, v in headers.items())]
                writer.write("\r\n".join([*lines, "", ""]).encode() + text)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(replies: Sequence[Reply | None]) -> AsyncIterator[ScriptedServer]:
    script = ScriptedServer(list(replies))
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        script.url = f"http://127.0.0.1:{port}/run_code"
        yield script


def client(script: ScriptedServer) -> FusionSandbox:
    return FusionSandbox(script.url, pause_s=0.001)


async def test_a_probe_comes_first_and_once() -> None:
    async with scripted([HEALTHY, ran("1\n"), ran("1\n")]) as script, client(script) as sandbox:
        for _ in range(2):
            assert (await sandbox.run(PROGRAM)).stdout == "1\n"
        assert [request["code"] for request in script.requests] == [
            "print(6 * 7)",
            "print(1)",
            "print(1)",
        ]


async def test_a_server_that_runs_nothing_is_found_out() -> None:
    async with scripted([ran("")]) as script, client(script) as sandbox:
        with pytest.raises(SandboxError, match=r"does not run Python: print\(6 \* 7\) gave ''"):
            await sandbox.run(PROGRAM)


async def test_504_is_tried_three_times_as_in_verl() -> None:
    busy: Reply = (504, {}, "late")
    async with scripted([HEALTHY, busy, busy, ran("1\n")]) as script, client(script) as sandbox:
        execution = await sandbox.run(PROGRAM)
        assert (execution.stdout, execution.num_retries) == ("1\n", 2)
    async with scripted([HEALTHY, busy, busy, busy]) as script, client(script) as sandbox:
        with pytest.raises(SandboxError, match="answered 504"):
            await sandbox.run(PROGRAM)
        assert len(script.requests) == 4


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_queue_is_waited_for(status: int) -> None:
    full = (status, {"retry-after": "0"}, {"detail": "1 programs run"})
    replies = [HEALTHY, *[full] * 9, ran("1\n")]
    async with scripted(replies) as script, client(script) as sandbox:
        assert (await sandbox.run(PROGRAM)).num_retries == 9
    async with scripted([HEALTHY, *[full] * 10]) as script, client(script) as sandbox:
        with pytest.raises(SandboxBusyError, match="1 programs run"):
            await sandbox.run(PROGRAM)


@pytest.mark.parametrize("status", [400, 404, 500, 502, 503])
async def test_other_answers_are_final(status: int) -> None:
    async with scripted([HEALTHY, (status, {}, "no")]) as script, client(script) as sandbox:
        with pytest.raises(SandboxError, match=f"answered {status}"):
            await sandbox.run(PROGRAM)


async def test_a_program_that_the_server_refuses_is_told_apart() -> None:
    detail = {"detail": [{"msg": "language 'cpp' is not run here"}]}
    async with scripted([HEALTHY, (422, {}, detail)]) as script, client(script) as sandbox:
        with pytest.raises(UnsupportedProgramError, match="'cpp' is not run here"):
            await sandbox.run(PROGRAM)


@pytest.mark.parametrize("answer", ["text", {}, encode_failure("no disk")])
async def test_an_answer_without_a_result_is_a_failure_and_is_probed_after(answer: object) -> None:
    replies = [HEALTHY, (200, {}, answer), HEALTHY, ran("1\n")]
    async with scripted(replies) as script, client(script) as sandbox:
        with pytest.raises(SandboxError, match=r"not one of /run_code|no disk"):
            await sandbox.run(PROGRAM)
        await sandbox.run(PROGRAM)
        assert [request["code"] for request in script.requests][2:] == ["print(6 * 7)", "print(1)"]


async def test_a_broken_connection_is_final_since_the_program_may_have_run() -> None:
    async with scripted([HEALTHY, None]) as script, client(script) as sandbox:
        with pytest.raises(SandboxError, match="broke off"):
            await sandbox.run(PROGRAM)


async def test_nobody_there_is_tried_three_times_and_named() -> None:
    async with scripted([]) as script:
        url = script.url
    async with FusionSandbox(url, pause_s=0.001) as sandbox:
        with pytest.raises(SandboxError, match=f"the sandbox at {url} cannot be reached"):
            await sandbox.run(PROGRAM)


async def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.tools.sandbox.fusion._ROOM_S", 0.05)
    async with scripted([HEALTHY]) as script, client(script) as sandbox:
        script.hold = True
        with pytest.raises(SandboxError, match=r"did not answer within 0\.25 s"):
            await sandbox.run(Program(code="", timeout_s=0.1))


async def test_cancelling_hangs_up() -> None:
    async with scripted([HEALTHY]) as script, client(script) as sandbox:
        script.hold = True
        running = asyncio.create_task(sandbox.run(PROGRAM))
        await script.held.wait()
        running.cancel()
        await script.hung_up.wait()


@pytest.mark.parametrize("url", ["", "localhost:8080/run_code", "ftp://x/run_code"])
async def test_an_address_is_needed(url: str) -> None:
    with pytest.raises(SetupError, match=r"must be like http://127\.0\.0\.1:8080/run_code"):
        FusionSandbox(url)
