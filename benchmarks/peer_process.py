"""A peer's code in a separate process and environment, asked line by line.

The process reads what to do from standard input, a line at a time, and answers each line with one
of JSON, after a first one that says that it is ready.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_SHARED = ("tools", "agent_loop", "tracing")


def python_of(environment: Path, requirements: Sequence[str]) -> Path:
    """Returns the interpreter of a virtual environment, which it makes if there is none."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
    return python


class PeerProcess:
    """A peer's process. Made by `start`.

    Args:
        name: Of the peer, for messages.
        process: With pipes.
        log: Where its standard error goes.
    """

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.pid = process.pid
        self._name = name
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls,
        name: str,
        python: Path,
        script: str,
        settings: Mapping[str, Any],
        log: Path,
        *,
        threads: int = 1,
    ) -> PeerProcess:
        """Starts it and waits until it is ready.

        Args:
            name: Of the peer.
            python: Its interpreter.
            script: File beside this one; it can import what in Treadle needs no requirement.
            settings: Passed to it as JSON.
            log: Where its standard error goes.
            threads: Of its numerical libraries.

        Raises:
            SystemExit: It ended; its output is printed.
        """
        sources = [Path(__file__).parent, *(_ROOT / "packages" / package for package in _SHARED)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(str(python), str(Path(__file__).with_name(script))),
                *("--settings", json.dumps(settings)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=file,
                env=environment,
                limit=1 << 24,
            )
        peer = cls(name, process, log)
        await peer._line()
        return peer

    async def ask(self, line: str) -> dict[str, Any]:
        """Sends one line and returns the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        return await self._line()

    async def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            output = self._log.read_text(errors="replace")[-4000:]
            raise SystemExit(f"{self._name} ended:\n{output}")
        report: dict[str, Any] = json.loads(line)
        return report

    async def end(self, *, wait_s: float = 30.0) -> None:
        """Ends it: by the end of its input, or by force after `wait_s`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), wait_s)
        self.kill()

    def kill(self) -> None:
        """Ends it at once, without an event loop."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
