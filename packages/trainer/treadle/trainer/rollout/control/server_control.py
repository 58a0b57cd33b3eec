"""The driver's side of `treadle servers`: carries out the requests in the run directory.

Invariants: the event loop waits for no disk. A disk failure ends neither requests nor the run; it
is logged once and retried every 0.5 s. A refused request changes nothing. When the block ends, the
requests in progress are refused, and the server list is removed to show that the run has ended.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

from treadle.agent_loop.aio import run_shielded
from treadle.trainer.launch.process import ProcessError
from treadle.trainer.rollout.control.control_files import (
    Answer,
    Request,
    make_directory,
    take_requests,
    write_answer,
    write_list,
)
from treadle.trainer.rollout.server_pool import ServerPool

__all__ = ["control_servers"]

_log = logging.getLogger(__name__)
_POLL_S = 0.5
_MAX_ADDING = 64
_WRITE_S = 30.0
"""Servers that are added at a time; each is queried, and joins at the end of the step."""


@contextlib.asynccontextmanager
async def control_servers(pool: ServerPool, run_dir: Path) -> AsyncIterator[None]:
    """Lets `treadle servers` change the servers of a connected pool while the block runs.

    Raises:
        OSError: The run directory cannot be written.
    """
    directory = await asyncio.to_thread(make_directory, run_dir)
    control = _Control(pool, directory)
    await control.write_list()
    serving = asyncio.create_task(control.serve(), name="treadle servers")
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        await control.aclose()
        await asyncio.to_thread(make_directory, run_dir)  # without the list


class _Control:
    def __init__(self, pool: ServerPool, directory: Path) -> None:
        self._pool = pool
        self._directory = directory
        self._adding: set[asyncio.Task[None]] = set()
        self._said = ""

    async def serve(self) -> None:
        while True:
            try:
                await self._take()
                await self.write_list()
            except OSError as error:
                self._say(error)
            else:
                self._said = ""
            await asyncio.sleep(_POLL_S)

    async def _take(self) -> None:
        for name, request in await asyncio.to_thread(take_requests, self._directory):
            if isinstance(request, Answer):
                await self._answer(name, request.state, request.text)
            elif request.action == "drain":
                await self._drain(name, request)
            elif len(self._adding) >= _MAX_ADDING:
                text = f"{_MAX_ADDING} servers are being added: add {request.which} after them"
                await self._answer(name, "refused", text)
            else:
                adding = asyncio.create_task(self._add(name, request.which))
                self._adding.add(adding)
                adding.add_done_callback(self._adding.discard)

    def _say(self, error: OSError) -> None:
        if str(error) != self._said:
            self._said = str(error)
            _log.warning("treadle servers cannot be answered now, and is tried again: %s", error)

    async def write_list(self) -> None:
        rows = [asdict(row) for row in self._pool.rows()]
        writing = asyncio.to_thread(write_list, self._directory, rows)
        # A thread goes on when its task is cancelled, and the list is removed after that.
        await run_shielded(writing, timeout_s=_WRITE_S)

    async def aclose(self) -> None:
        for adding in self._adding:
            adding.cancel()
        await asyncio.gather(*self._adding, return_exceptions=True)

    async def _add(self, name: str, address: str) -> None:
        try:
            serves = await self._pool.add(address)
            text = f"{address} fits; it gets the weights and serves once the policy is at rest"
            await self._answer(name, "accepted", text)
            await serves
        except ProcessError as error:
            await self._answer(name, "refused", str(error))
        else:
            version = self._pool.weight_version
            await self._answer(name, "done", f"{address} serves, with weight version {version}")

    async def _drain(self, name: str, request: Request) -> None:
        try:
            sessions = self._pool.drain(request.which, now=request.now)
        except ProcessError as error:
            await self._answer(name, "refused", str(error))
            return
        end = "move to other servers" if request.now else "end there"
        text = f"{request.which} takes no new session; {sessions} that are open {end}, and it"
        await self._answer(name, "done", f"{text} leaves after the present step")

    async def _answer(self, name: str, state: str, text: str) -> None:
        answer = Answer(state=state, text=text)  # type: ignore[arg-type]
        while True:
            try:
                await asyncio.to_thread(write_answer, self._directory, name, answer)
            except OSError as error:  # who asked waits for it
                self._say(error)
                await asyncio.sleep(_POLL_S)
            else:
                return
