"""The capture endpoint as a process of its own, between an agent and a rollout server."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


@pytest.mark.asyncio
async def test_an_agent_anywhere_is_captured_through_a_process() -> None:
    async with process(
        *("treadle.rollout_server", "--engine", "fake", "--model.path", str(MODEL))
    ) as server:
        replica = await rollout_server(server)
        async with process(
            *("treadle.agent_loop.proxy", "--replicas", replica, "--tokenizer", str(MODEL)),
            *("--port", "0", "--max-response-tokens", "200", "--max-tokens", "16"),
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
                verify=False,
            )
            async with web:
                opened = (await web.post("/sessions", json={"task_id": "t", "seed": 1})).json()
                async with AsyncOpenAI(
                    base_url=opened["base_url"],
                    api_key=opened["api_key"],
                    http_client=DefaultAsyncHttpxClient(verify=False),
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
