"""The policy group: the driver's end of all policy ranks.

Invariant: a command goes to every rank before any answer is awaited; commands do not overlap.
The caller waits in `call`; one thread per rank waits for that rank's answer. A rank that dies
closes its connection, which wakes its thread at once. The group is then broken: `call` raises
`PolicyError` with the root cause (the rank whose failure is not the loss of another rank), and the
group can only be closed. Closing ends the processes, which frees every thread.
"""

import asyncio
import logging
import pickle
import secrets
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Self

from treadle.agent_loop.aio import concurrently
from treadle.trainer.config.policy import PolicyConfig
from treadle.trainer.launch.environment import thread_variables
from treadle.trainer.launch.local import describe_exit
from treadle.trainer.launch.process import Launcher, Process, ProcessSpec, wait_until_ended
from treadle.trainer.policy.commands import (
    AUTHKEY_VARIABLE,
    Command,
    Done,
    Failed,
    InitModel,
    OpenRendezvous,
    Stop,
)
from treadle.trainer.policy.driver_connection import connect_to_rank

__all__ = ["PolicyError", "PolicyGroup"]

_log = logging.getLogger(__name__)

_GRACE_S = 5.0


class PolicyError(RuntimeError):
    """The policy cannot continue; the message names the rank, the cause and the log.

    Attributes:
        from_input: Whether the user's input is the cause.
    """

    def __init__(self, message: str, *, from_input: bool = False) -> None:
        super().__init__(message)
        self.from_input = from_input


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: Process
    connection: "Connection[Any, Any]"


@dataclass(frozen=True, slots=True)
class _Lost:
    """The connection to a rank ended without an answer."""


class PolicyGroup:
    """Starts the ranks, sends them commands, and ends them.

    `async with PolicyGroup(...) as policy: await policy.call(Update(...))`
    """

    _PATIENCE_S: ClassVar[float] = 60.0
    """How long a command may take before a warning names the ranks that work on it; then twice as
    long, and so on."""

    def __init__(
        self,
        launcher: Launcher,
        config: PolicyConfig,
        model_path: Path,
        *,
        with_reference: bool,
        threads: int,
        gpus_per_rank: float,
        start_deadline_s: float,
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._model_path = model_path
        self._with_reference = with_reference
        self._threads = threads
        self._gpus_per_rank = gpus_per_rank
        self._start_deadline_s = start_deadline_s
        self._key = secrets.token_bytes(32)
        self._ranks: list[_Rank] = []
        self._broken = False
        self._pool = ThreadPoolExecutor(
            max_workers=config.parallel.num_ranks, thread_name_prefix="policy-rank"
        )

    async def __aenter__(self) -> Self:
        """Starts the ranks and loads the model into them.

        Raises:
            ProcessError: A rank did not start.
            PolicyError: The model cannot be loaded, or cannot be split as configured.
        """
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        size = self._config.parallel.num_ranks
        self._ranks = await concurrently(self._start_rank(number) for number in range(size))
        address, port = "127.0.0.1", 0
        if size > 1:
            rendezvous = (await self._exchange([OpenRendezvous()] + [None] * (size - 1)))[0]
            host, _, digits = str(rendezvous).rpartition(":")
            address, port = host, int(digits)
        await self._exchange(
            [
                InitModel(
                    config=self._config,
                    model_path=self._model_path,
                    with_reference=self._with_reference,
                    rank=number,
                    world_size=size,
                    master_addr=address,
                    master_port=port,
                    # Ray shows each process only its own GPUs, so its GPU is the first one.
                    local_rank=0 if self._gpus_per_rank else number,
                )
                for number in range(size)
            ]
        )

    async def _start_rank(self, number: int) -> _Rank:
        process = await self._launcher.start(
            ProcessSpec(
                name=f"policy-{number}",
                module="treadle.trainer.policy.rank",
                args=("--host", "{host}"),
                env={AUTHKEY_VARIABLE: self._key.hex(), **thread_variables(self._threads)},
                gpus=self._gpus_per_rank,
            )
        )
        host, _, port = (await process.ready(self._start_deadline_s)).rpartition(":")
        deadline_s = self._start_deadline_s
        connect = partial(connect_to_rank, host, int(port), self._key, deadline_s=deadline_s)
        try:
            async with asyncio.timeout(deadline_s):  # also if the rank stands still meanwhile
                connection = await asyncio.get_running_loop().run_in_executor(self._pool, connect)
        except (AuthenticationError, EOFError, OSError) as error:
            raise PolicyError(
                f"policy rank {number} at {host}:{port} took no connection within {deadline_s:g} s "
                f"(launch.start_deadline_s): {type(error).__name__}: {error}"
            ) from error
        return _Rank(number, process, connection)

    async def call(self, command: Command) -> list[Any]:
        """Sends a command to all ranks and returns their answers, by rank.

        Raises:
            PolicyError: A rank raised or died.
        """
        return await self._exchange([command] * len(self._ranks))

    async def _exchange(self, commands: Sequence[Command | None]) -> list[Any]:
        """Sends each rank its command (None: nothing to do) and returns the answers."""
        assert not self._broken, "a broken policy group can only be closed"
        loop = asyncio.get_running_loop()
        payloads = {id(command): pickle.dumps(command) for command in commands}  # once

        def exchange(rank: _Rank, command: Command) -> "asyncio.Future[Done | Failed | _Lost]":
            payload = payloads[id(command)]
            return loop.run_in_executor(self._pool, _round_trip, rank.connection, payload)

        waits = [
            exchange(rank, command)
            for rank, command in zip(self._ranks, commands, strict=True)
            if command is not None
        ]
        self._broken = True  # until every answer has arrived
        pending = set(waits)
        patience_s = self._PATIENCE_S
        while pending:
            ended, pending = await asyncio.wait(
                pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended:
                self._tell_of_wait(commands, waits, pending, patience_s)
                patience_s *= 2
            if any(not isinstance(task.result(), Done) for task in ended):
                break
        if pending:  # the first failure may only be the loss of the rank that failed
            await asyncio.wait(pending, timeout=_GRACE_S)
        answers = [task.result() if task.done() else None for task in waits]
        done = [answer for answer in answers if isinstance(answer, Done)]
        if len(done) < len(answers):
            raise await self._explain(answers)
        self._broken = False
        return [answer.value for answer in done]

    def _tell_of_wait(
        self,
        commands: Sequence[Command | None],
        waits: Sequence["asyncio.Future[Any]"],
        pending: Set["asyncio.Future[Any]"],
        waited_s: float,
    ) -> None:
        """Says which ranks have not answered: one that stands still looks like one at work."""
        asked = [number for number, command in enumerate(commands) if command is not None]
        late = [number for number, wait in zip(asked, waits, strict=True) if wait in pending]
        what = type(commands[late[0]]).__name__
        names = ", ".join(str(number) for number in late)
        _log.warning(
            "no answer to %s for %g s from policy rank %s: it works, or its process stands still "
            "(see `ps`, and policy-%d.log)",
            what,
            waited_s,
            names,
            late[0],
        )

    async def _explain(self, answers: Sequence[Done | Failed | _Lost | None]) -> PolicyError:
        """Returns the failure that is not the consequence of another rank's."""

        def consequence(answer: Done | Failed | _Lost | None) -> int:
            if isinstance(answer, Failed):
                return 2 if answer.kind == "peer" else 0
            return 1 if isinstance(answer, _Lost) else 3

        number = min(range(len(answers)), key=lambda n: consequence(answers[n]))
        answer, process = answers[number], self._ranks[number].process
        if isinstance(answer, Failed) and answer.kind in ("input", "checkpoint"):
            message = answer.message.partition(": ")[2]
            return PolicyError(message, from_input=True)
        if isinstance(answer, Failed):
            return PolicyError(
                f"policy rank {number} failed: {answer.message}\n{answer.traceback.rstrip()}"
            )
        status = await wait_until_ended(process, _GRACE_S)
        ended = describe_exit(status) if status is not None else "closed its connection"
        return PolicyError(
            f"policy rank {number} {ended}; its log ends with:\n{await process.log_tail()}"
        )

    async def __aexit__(self, *exc_info: object) -> None:
        """Lets idle ranks exit by themselves, and ends those that do not."""
        if not self._broken and self._ranks:
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self.call(Stop())
            except (PolicyError, TimeoutError):
                pass  # the processes are ended below either way
        await asyncio.gather(*(rank.process.stop(_GRACE_S) for rank in self._ranks))
        for rank in self._ranks:
            rank.connection.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _round_trip(connection: "Connection[Any, Any]", payload: bytes) -> Done | Failed | _Lost:
    try:
        connection.send_bytes(payload)
        answer = connection.recv()
    except (EOFError, OSError):
        return _Lost()
    assert isinstance(answer, Done | Failed)
    return answer
