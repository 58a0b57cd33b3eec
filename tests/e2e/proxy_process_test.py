"""The capture endpoint as a process of its own, between an agent and a rollout server."""

import asyncio
import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

import treadle.trainer.demo

MODEL = Path(treadle.trainer.demo.__file__).parent / "calculator" / "model"
Process = asyncio.subprocess.Process


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[Process]:
    """A Python module as a process; killed at the end if it still runs."""
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def rollout_server(started: Process) -> str:
    """Waits until it serves; its address."""
    assert started.stderr is not None
    log = b""
    while (ready := re.search(rb"serves at (\S+)", log)) is None:
        line = await started.stderr.readline()
        assert line, f"the server ended before it was ready: {log.decode()}"
        log += line
    return ready[1].decode()


@dataclass(frozen=True, kw_only=True)
class Secrets:
    """Options with which everybody shows a certificate and the server wants a token."""

    server: tuple[str, ...] = ()
    proxy: tuple[str, ...] = ()
    trusted: "ssl.SSLContext | bool" = False


def secrets_in(folder: Path) -> Secrets:
    """Makes a certificate and a token; none where there is no openssl."""
    if shutil.which("openssl") is None:
        return Secrets()
    certificate, key, token = (str(folder / name) for name in ("cert.pem", "key.pem", "token"))
    Path(token).write_text("s3cret")
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    return Secrets(
        server=(
            *("--security.tls_certificate", certificate, "--security.tls_key", key),
            *("--security.token_file", token),
        ),
        proxy=(
            *("--tls-certificate", certificate, "--tls-key", key, "--replica-tls"),
            *("--replica-certificates", certificate, "--replica-token-file", token),
        ),
        trusted=ssl.create_default_context(cafile=certificate),
    )


@pytest.mark.asyncio
async def test_an_agent_anywhere_is_captured_through_a_process(tmp_path: Path) -> None:
    secrets = secrets_in(tmp_path)
    async with process(
        *("treadle.rollout_server", "--engine", "fake", "--model.path", str(MODEL)),
        *secrets.server,
    ) as server:
        replica = await rollout_server(server)
        async with process(
            *("treadle.agent_loop.proxy", "--replicas", replica, "--tokenizer", str(MODEL)),
            *("--port", "0", "--max-response-tokens", "200", "--max-tokens", "16"),
            *secrets.proxy,
        ) as proxy:
            assert proxy.stdout is not None
            line = await proxy.stdout.readline()
            if not line:
                _, log = await proxy.communicate()
                raise AssertionError(log.decode())
            said = json.loads(line)
            web = httpx.AsyncClient(
                base_url=said["address"],
                headers={"authorization": f"Bearer {said['key']}"},
                verify=secrets.trusted,
            )
            async with web:
                opened = (await web.post("/sessions", json={"task_id": "t", "seed": 1})).json()
                async with AsyncOpenAI(
                    base_url=opened["base_url"],
                    api_key=opened["api_key"],
                    http_client=DefaultAsyncHttpxClient(verify=secrets.trusted),
                ) as client:
                    answer = await client.chat.completions.create(
                        model="any",
                        messages=[{"role": "user", "content": "What is 2 + 3?"}],
                        logprobs=True,
                    )
                trajectory = (await web.post(f"/sessions/{opened['id']}/finish")).json()
            (sample,) = trajectory["samples"]
            assert answer.usage is not None and answer.choices[0].logprobs is not None
            assert sum(sample["loss_mask"]) == answer.usage.completion_tokens
            assert answer.choices[0].logprobs.content is not None
            assert [t.logprob for t in answer.choices[0].logprobs.content] == [
                p for p, on in zip(sample["logprobs"], sample["loss_mask"], strict=True) if on
            ]
            proxy.send_signal(signal.SIGTERM)
            assert await proxy.wait() == 0


@pytest.mark.asyncio
async def test_a_process_that_cannot_serve_says_why_in_one_line() -> None:
    wrong = ("--replicas", "127.0.0.1:1", "--tokenizer", "/no/such/directory")
    async with process("treadle.agent_loop.proxy", *wrong) as proxy:
        _, log = await proxy.communicate()
        assert proxy.returncode == 1
        assert log.decode().splitlines() == [
            "python -m treadle.agent_loop.proxy: /no/such/directory holds no tokenizer.json"
        ]
