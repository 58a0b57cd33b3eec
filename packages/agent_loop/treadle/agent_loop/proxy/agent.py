"""The black-box agent: a function or a command that gets the address of its model.

Invariant: when its call returns or raises, the agent has ended; a command with all processes that
it started, detached ones too. An error in it is an `AgentCrashedError`.

The caller waits for the agent's end. Cancelling the call ends the agent: a function by
cancellation, a command by SIGTERM and, `grace_s` later, SIGKILL.
"""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from treadle.agent_loop.aio import run_shielded, run_until
from treadle.agent_loop.child_output import output_pipe
from treadle.agent_loop.errors import LoopError
from treadle.agent_loop.proxy.messages import written_message, written_task
from treadle.agent_loop.types import AgentTask
from treadle.tracing.child_process import supervised
from treadle.tracing.inert import inert

_TAIL_BYTES = 2000
_ANTHROPIC = "ANTHROPIC_"


class AgentCrashedError(LoopError):
    """The agent ended with an exception or a non-zero status."""

    retryable = True  # a sampled text may have caused it


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """The task, the addresses and the key that an agent gets.

    Attributes:
        base_url: Address of its model, for OpenAI's clients; ends with /v1.
        api_key: Key of its model; valid only for this session.
    """

    task: AgentTask
    base_url: str
    api_key: str = field(repr=False)
    reward_url: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The task's messages in OpenAI's format."""
        return [written_message(message) for message in self.task.messages]

    @property
    def anthropic_base_url(self) -> str:
        """Address of its model for Anthropic's clients, which add /v1 themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables OPENAI_BASE_URL, OPENAI_API_KEY and TREADLE_REWARD_URL."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "TREADLE_REWARD_URL": self.reward_url,
        }


Agent: TypeAlias = Callable[[AgentSession], Awaitable[float | None]]
"""Does its task; returns the reward, or None if it does not determine the reward."""


class CommandAgent:
    """A program as an agent.

    The program reads the task from standard input, as a JSON object with `task_id`, `messages`
    (in OpenAI's format) and `fields`. Its environment has the variables of
    `AgentSession.environment`, those inherited from this process, the endpoint's host in NO_PROXY,
    and, unless it has variables of Anthropic already, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY of
    the session. The end of its output is shown if it fails.

    Args:
        command: Program and arguments; no shell.
        inherited: Names of variables to inherit from this process. None means all, including
            secrets.
        grace_s: Seconds from SIGTERM to SIGKILL.

    Raises:
        ValueError: The command is empty, or `grace_s` negative.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        inherited: Sequence[str] | None = None,
        grace_s: float = 0.5,
    ) -> None:
        if not command or isinstance(command, str):
            raise ValueError(f"the command is {command!r}; it must be a list of strings")
        if grace_s < 0:
            raise ValueError(f"grace_s is {grace_s}; it must be at least 0")
        self._command = tuple(command)
        self._environment = dict(environment or {})
        self._inherited = inherited
        self._grace_s = grace_s

    async def __call__(self, session: AgentSession) -> float | None:
        """Runs the program to its end.

        Raises:
            AgentCrashedError: The program did not start, or ended with a non-zero status.
        """
        tail = bytearray()
        told = json.dumps(written_task(session.task)).encode()
        async with output_pipe() as (reader, write_end):
            process = await self._start(session, told, write_end)
            try:
                await run_until(_drain(reader, tail), process.wait)
                status = await process.wait()
            finally:
                await run_shielded(_end(process), timeout_s=self._grace_s + 10.0)
            with contextlib.suppress(TimeoutError):  # another process may hold the pipe open
                async with asyncio.timeout(self._grace_s):
                    await _drain(reader, tail)
        if status != 0:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            printed = tail.decode(errors="replace").strip() or "it printed nothing"
            raise AgentCrashedError(f"agent {self._command[0]!r} {how}: {inert(printed)}")
        return None

    async def _start(
        self, session: AgentSession, told: bytes, write_end: int
    ) -> asyncio.subprocess.Process:
        with tempfile.TemporaryFile() as task:
            try:
                task.write(told)
                task.seek(0)
                environment = self._environment_of(session)
                return await asyncio.create_subprocess_exec(
                    *supervised(self._command, environment=environment, grace_s=self._grace_s),
                    stdin=task,
                    stdout=write_end,
                    stderr=write_end,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise AgentCrashedError(
                    f"agent {self._command[0]!r} does not start: {error}"
                ) from error
            finally:
                os.close(write_end)

    def _environment_of(self, session: AgentSession) -> dict[str, str]:
        names = os.environ if self._inherited is None else self._inherited
        ours = {name: os.environ[name] for name in names if name in os.environ}
        environment = {**ours, **self._environment, **session.environment}
        # An agent may use Anthropic's model as a helper: what is set for that stays.
        if not any(name.startswith(_ANTHROPIC) for name in environment):
            environment[f"{_ANTHROPIC}BASE_URL"] = session.anthropic_base_url
            environment[f"{_ANTHROPIC}API_KEY"] = session.api_key
        host = urlsplit(session.base_url).hostname
        for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach this machine's addresses
            if (given := environment.get(name)) != "*":
                environment[name] = f"{given},{host}" if given else f"{host}"
        return environment


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the program and all that it started; the supervisor keeps the grace."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.wait()


async def _drain(reader: asyncio.StreamReader, tail: bytearray) -> None:
    """Reads to the end, and keeps the last part of the output."""
    while data := await reader.read(65536):
        tail += data
        del tail[:-_TAIL_BYTES]
