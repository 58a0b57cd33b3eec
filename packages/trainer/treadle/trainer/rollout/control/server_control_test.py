"""The driver's side of `treadle servers`, with a disk that fails when a test says so."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import pytest

from treadle.trainer.rollout.control import server_control
from treadle.trainer.rollout.control.control_files import Request, make_directory
from treadle.trainer.rollout.control.server_control import control_servers
from treadle.trainer.rollout.rotation import ServerRow
from treadle.trainer.rollout.server_pool import ServerPool


@dataclass
class Pool:
    """Notes that it was asked for its servers, and what was drained."""

    asked: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    async def add(self, address: str) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().create_future()  # until the step ends

    def rows(self) -> Sequence[ServerRow]:
        self.asked.release()
        return ()

    def drain(self, which: str, *, now: bool) -> int:
        self.drained.set()
        return 3


@pytest.mark.asyncio
async def test_a_disk_that_fails_is_said_once_and_requests_are_taken_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_control, "_POLL_S", 0.001)
    pool = Pool()
    async with control_servers(cast(ServerPool, pool), tmp_path):
        shutil.rmtree(tmp_path / "servers")
        while not caplog.records:
            await pool.asked.acquire()
        for _ in range(3):
            await pool.asked.acquire()
        assert "treadle servers cannot be answered now" in caplog.text
        assert len(caplog.records) == 1
        directory = make_directory(tmp_path)
        (directory / "a.request").mkdir()  # no request, and the task survives it
        request = Request(action="drain", which="rollout-0")
        (directory / "new").write_text(json.dumps(asdict(request)))
        (directory / "new").rename(directory / "name.request")
        await pool.drained.wait()
        answer = directory / "name.answer"
        while not answer.exists():
            await pool.asked.acquire()
        assert "3 that are open end there" in json.loads(answer.read_text())["text"]
    assert not list(directory.iterdir())


@pytest.mark.asyncio
async def test_no_more_servers_are_added_at_a_time_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_control, "_POLL_S", 0.001)
    monkeypatch.setattr(server_control, "_MAX_ADDING", 2)
    pool = Pool()
    async with control_servers(cast(ServerPool, pool), tmp_path):
        directory = make_directory(tmp_path)
        for number in range(3):
            request = Request(action="add", which=f"host:{number}")
            (directory / "new").write_text(json.dumps(asdict(request)))
            (directory / "new").rename(directory / f"{number}.request")
            answer = directory / f"{number}.answer"
            while not answer.exists():
                await pool.asked.acquire()
            told = json.loads(answer.read_text())
            assert told["state"] == ("accepted" if number < 2 else "refused"), told
        assert told["text"] == "2 servers are being added: add host:2 after them"
