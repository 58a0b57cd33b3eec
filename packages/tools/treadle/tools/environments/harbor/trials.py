"""Harbor's interpreter as one process of a run, which forks for each trial.

Invariant: when `run` returns or raises, its trial has ended, and with it its room. The process is
started by the first trial and ended, with all trials, by `aclose`, or with the run. Its import of
Harbor is paid once.

Who waits: `run`, for its trial. Cancelling it kills the trial.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from treadle.agent_loop.aio import run_shielded
from treadle.agent_loop.child_output import shown_output
from treadle.agent_loop.proxy import AgentCrashedError
from treadle.tracing.child_process import supervised
from treadle.tracing.inert import inert

_END_S: Final = 10.0
_TAIL: Final = 2000
# LiteLLM would look for prices on the network at each start.
_QUIET: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0"}


class HarborTrials:
    """Runs trials, any number at a time.

    Args:
        command: Program and arguments that start the `server`; no shell.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._output = contextlib.AsyncExitStack()
        self._numbers = itertools.count()
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def run(
        self,
        path: str,
        settings: Mapping[str, object],
        environment: Mapping[str, str],
        folder: Path,
    ) -> float:
        """Runs a trial; returns its reward.

        Args:
            path: The folder of the task.
            environment: Variables that the trial has in addition.
            folder: An empty one, for its output and its temporary files.

        Raises:
            AgentCrashedError: It failed; with the end of its output.
        """
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        number = next(self._numbers)
        ended = self._ended[number] = asyncio.get_running_loop().create_future()
        job = {"path": path, "settings": settings, "environment": environment}
        try:
            self._send({"id": number, "folder": str(folder), **job})
            status = await asyncio.shield(ended)
        finally:
            if not ended.done():
                self._send({"end": number})
                await run_shielded(asyncio.wait([ended]), timeout_s=_END_S)
            del self._ended[number]
        reward, output = await asyncio.to_thread(_read, folder)
        if status != 0 or reward is None:
            raise AgentCrashedError(f"the trial ended with status {status}: {inert(output)}")
        return reward

    async def aclose(self) -> None:
        """Ends the process with all trials."""
        process, self._process = self._process, None
        async with self._output:
            if process is not None:
                await run_shielded(_end(process), timeout_s=_END_S)
        if self._reading is not None:
            await self._reading

    async def _start(self) -> None:
        output = await self._output.enter_async_context(shown_output())
        environment = {**os.environ, **_QUIET}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *supervised(self._command, environment=environment, grace_s=0.5),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentCrashedError(f"{self._command[0]!r} does not start: {error}") from error
        self._reading = asyncio.create_task(self._read(self._process), name="ends of trials")

    def _send(self, message: Mapping[str, object]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # `_read` sees its end
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said = json.loads(line)
            if (ended := self._ended.get(said["id"])) and not ended.done():
                ended.set_result(said["status"])
        status = await process.wait()
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(status or -1)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.wait()


def _read(folder: Path) -> tuple[float | None, str]:
    reward, output = folder / "reward", folder / "output"
    words = output.read_text(errors="replace")[-_TAIL:].strip() if output.exists() else ""
    return float(reward.read_text()) if reward.exists() else None, words or "it printed nothing"
