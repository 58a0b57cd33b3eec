"""A sandbox behind HTTP: SandboxFusion, or our own server, which has the same API.

Invariant: a program is sent again only if it cannot have run or SandboxFusion requests it:
no connection, 504 (verl's rule; three attempts in all, 1 s and 2 s apart), 429 or 503 with
`Retry-After` (ten attempts). A read timeout is final: the program may have run. Cancelling
closes the connection, which ends the program on our server.

Who waits: `run`, for the answer's next byte, `2 * timeout_s + 10` seconds as verl does, and between
two attempts. SandboxFusion is silent while a program waits in its queue, so that a long queue looks
like a dead server; ours sends a blank every 5 s. The caller limits the number of waiting requests.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Final, Self
from urllib.parse import urlsplit

import httpx

from treadle.agent_loop import SetupError
from treadle.tools.sandbox.execution import (
    Execution,
    Program,
    SandboxBusyError,
    SandboxError,
    UnsupportedProgramError,
)
from treadle.tools.sandbox.wire import QUEUE_HEADER, WARM_HEADER, decode_response, encode_request

_ATTEMPTS: Final = 3
_BUSY_ATTEMPTS: Final = 10
_LONGEST_PAUSE_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 10.0
_ROOM_S: Final = 10.0
_PROBE: Final = Program(code="print(6 * 7)", timeout_s=5.0)


class FusionSandbox:
    """Runs programs by `POST /run_code`.

    Args:
        pause_s: Unit of the pause before another attempt after a 504 or a lost connection.

    Raises:
        SetupError: The address is none.
    """

    def __init__(self, url: str, *, pause_s: float = 1.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SetupError(
                f"sandbox_fusion_url is {url!r}; it must be like http://127.0.0.1:8080/run_code"
            )
        self._url = url
        self._pause_s = pause_s
        self._healthy = False
        self._probing = asyncio.Lock()
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        """Opens the connections' pool; nothing is sent yet."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        # The address is what the configuration says, not what the environment adds to it.
        self._client = await httpx.AsyncClient(limits=limits, trust_env=False).__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Closes it."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def run(self, program: Program) -> Execution:
        """Runs a program; before the first, and after a failure, a small one as a probe.

        Raises:
            UnsupportedProgramError: The server refuses it.
            SandboxBusyError: Its queue stayed full.
            SandboxError: It cannot be reached, does not answer, or failed.
        """
        await self._probe()
        try:
            return await self._run(program)
        except (SandboxBusyError, UnsupportedProgramError):
            raise
        except SandboxError:
            self._healthy = False
            raise

    async def _probe(self) -> None:
        """Runs one program, because a server may accept connections and never run anything."""
        async with self._probing:
            if self._healthy:
                return
            execution = await self._run(_PROBE)
            if execution.stdout.strip() != "42":
                raise SandboxError(
                    f"the sandbox at {self._url} does not run Python: print(6 * 7) gave "
                    f"{execution.stdout!r} {execution.stderr!r}"
                )
            self._healthy = True

    async def _run(self, program: Program) -> Execution:
        tries = busy = 0
        paused_s = 0.0
        while True:
            outcome = await self._post(program)
            if isinstance(outcome, Execution):
                queue_s = outcome.queue_s + paused_s
                return replace(outcome, queue_s=queue_s, num_retries=tries + busy)
            if isinstance(outcome, SandboxBusyError):
                busy += 1
                if busy == _BUSY_ATTEMPTS:
                    raise outcome
                pause_s = min(outcome.retry_after_s, _LONGEST_PAUSE_S)
            else:
                tries += 1
                if tries == _ATTEMPTS:
                    raise outcome
                pause_s = self._pause_s * tries
            paused_s += pause_s
            await asyncio.sleep(pause_s)

    async def _post(self, program: Program) -> Execution | SandboxError:
        """Returns one attempt: the execution, or the error after which another may be made.

        Raises:
            SandboxError: Another attempt must not be made.
        """
        assert self._client is not None, "the sandbox was not entered"
        read_s = 2 * program.timeout_s + _ROOM_S
        timeout = httpx.Timeout(read_s, connect=_CONNECT_TIMEOUT_S, pool=None)
        where = f"the sandbox at {self._url}"
        began = time.monotonic()
        try:
            answer = await self._client.post(
                self._url, json=encode_request(program), timeout=timeout
            )
        except httpx.ReadTimeout:
            raise SandboxError(f"{where} did not answer within {read_s:g} s") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return SandboxError(f"{where} cannot be reached: {error or type(error).__name__}")
        except httpx.HTTPError as error:
            raise SandboxError(f"{where} broke off: {type(error).__name__}: {error}") from error
        match answer.status_code:
            case 200:
                return self._decoded(answer, time.monotonic() - began)
            case 504:
                return SandboxError(f"{where} answered 504: {answer.text[:200]}")
            case 429 | 503 if (delay := answer.headers.get("retry-after", "")).isdigit():
                return SandboxBusyError(
                    f"{where} is busy: {answer.text[:200]}", retry_after_s=float(delay)
                )
            case 413 | 422:
                raise UnsupportedProgramError(f"{where} refuses the program: {answer.text[:500]}")
            case status:
                raise SandboxError(f"{where} answered {status}: {answer.text[:200]}")

    @staticmethod
    def _decoded(answer: httpx.Response, seconds: float) -> Execution:
        try:
            body = answer.json()
        except ValueError:
            body = answer.text
        execution = decode_response(body, warm=answer.headers.get(WARM_HEADER) == "1")
        # SandboxFusion does not say; what was not running was waiting.
        waited_s = max(0.0, seconds - execution.execution_s)
        return replace(execution, queue_s=float(answer.headers.get(QUEUE_HEADER, waited_s)))
