"""The policy group: the driver's end of all policy ranks.

Invariant: a command goes to every rank before any answer is awaited; commands do not overlap.
The caller waits in `call`; one thread per rank waits for that rank's answer. A rank that dies
closes its connection, which wakes its thread at once; one that gives no sign of life for
`policy.unresponsive_s` is dead too. The group is then broken: `call` raises `PolicyError` with the
root cause (the rank whose failure is not the loss of another rank), and the group can only be
closed. Closing ends the processes, which frees every thread.
"""

import asyncio
import logging
import pickle
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Self

from treadle.agent_loop.aio import concurrently
from treadle.policy.backends.megatron.prefixes.plan import mode_on
from treadle.policy.client.commands import (
    AUTHKEY_VARIABLE,
    Alive,
    Command,
    Done,
    Failed,
    InitModel,
    OfSequences,
    OpenRendezvous,
    Sharded,
    Stop,
    Update,
    UpdateCritic,
)
from treadle.policy.client.process import (
    RankProcess,
    RankProgram,
    StartRank,
    wait_until_ended,
)
from treadle.policy.client.shards import Frame, Outgoing, assign
from treadle.policy.client.signs_of_life import Silence, beat_s
from treadle.policy.config.critic import CriticConfig
from treadle.policy.config.policy import PolicyConfig
from treadle.policy.rank.driver_connection import connect_to_rank, tls_arguments
from treadle.policy.rank.run_tls import RunTls

__all__ = ["PolicyError", "PolicyGroup"]

_log = logging.getLogger(__name__)

_GRACE_S = 5.0
_TAIL = 20
"""Lines of a rank's log in an error."""
_Parts = Callable[[], Sequence[Frame]]


class PolicyError(RuntimeError):
    """The policy cannot continue; the message names the rank, the cause and the log.

    Attributes:
        from_input: Whether the user's input is the cause.
        lost: Whether a rank is gone, stands still or cannot reach the others; a run that resumes
            need not meet it again.
    """

    def __init__(self, message: str, *, from_input: bool = False, lost: bool = False) -> None:
        super().__init__(message)
        self.from_input = from_input
        self.lost = lost


@dataclass(slots=True)
class _Rank:
    """One rank.

    Attributes:
        sign: Its latest sign of life.
        signs: How many it has given.
        silent: Whether it was found dead for want of them.
    """

    number: int
    process: RankProcess
    connection: "Connection[Any, Any]"
    sign: Alive
    signs: int = 1
    silent: bool = False

    @property
    def process_text(self) -> str:
        """Its process id and node, for a message."""
        return f"pid {self.sign.pid} on {self.sign.node}"


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
        start_rank: StartRank,
        config: PolicyConfig,
        model_path: Path,
        *,
        with_reference: bool,
        reference_path: Path | None = None,
        own_devices: bool = False,
        start_deadline_s: float,
        critic: CriticConfig | None = None,
        tls: RunTls | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            start_rank: Starts the process of a rank.
            config: Of the policy.
            model_path: Directory of the model that training starts from.
            with_reference: Whether the ranks keep a reference.
            reference_path: Directory of the reference; None: it is the model that training starts
                from.
            own_devices: Whether the process of a rank sees its own GPUs only.
            start_deadline_s: Maximum time for a rank to start, and then to be connected.
            critic: Of the critic on the same ranks; None: there is none.
            tls: The run's certificates; None: connections to ranks are in plain text.
        """
        self._start_process = start_rank
        self._config = config
        self._model_path = model_path
        self._with_reference = with_reference
        self._reference_path = reference_path
        self._critic = critic
        self._own_devices = own_devices
        self._tls = tls
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
                    reference_path=self._reference_path,
                    rank=number,
                    world_size=size,
                    master_addr=address,
                    master_port=port,
                    # A process that has its own GPUs sees no others, so its GPU is the first one.
                    local_rank=0 if self._own_devices else number,
                    critic=self._critic,
                )
                for number in range(size)
            ]
        )

    async def _start_rank(self, number: int) -> _Rank:
        process = await self._start_process(
            RankProgram(
                number=number,
                command=self._config.command,
                args=(
                    *("--host", "{host}"),
                    *("--beat_s", str(beat_s(self._config.unresponsive_s))),
                    *tls_arguments(self._tls),
                ),
                env={AUTHKEY_VARIABLE: self._key.hex()},
            )
        )
        host, _, port = (await process.ready(self._start_deadline_s)).rpartition(":")
        return await self._connect(number, process, host, int(port))

    async def _connect(self, number: int, process: RankProcess, host: str, port: int) -> _Rank:
        """Connects to a rank that has started.

        Raises:
            PolicyError: It ended meanwhile, or took no connection in time.
        """
        deadline_s, given_up = self._start_deadline_s, threading.Event()
        connect = partial(
            _connect,
            number,
            process,
            host,
            port,
            self._key,
            deadline_s,
            given_up=given_up,
            tls=self._tls,
        )
        connecting = asyncio.get_running_loop().run_in_executor(self._pool, connect)
        ended = asyncio.create_task(process.wait(), name=f"end of policy-{number}")
        try:
            async with asyncio.timeout(deadline_s):  # also if the rank stands still meanwhile
                waits: set[asyncio.Future[Any]] = {connecting, ended}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not connecting.done():
                    raise await self._lost(number, process)
                return await connecting
        except (AuthenticationError, EOFError, OSError) as error:
            hung_up = isinstance(error, EOFError)
            if hung_up and await wait_until_ended(process, _GRACE_S) is not None:
                raise await self._lost(number, process) from error
            raise PolicyError(
                f"policy rank {number} at {host}:{port} took no connection within {deadline_s:g} s "
                f"(launch.start_deadline_s): {type(error).__name__}: {error}"
            ) from error
        finally:
            given_up.set()
            ended.cancel()

    async def call(self, command: Command) -> list[Any]:
        """Sends a command to all ranks and returns their answers, by rank.

        Of sequences, each data-parallel group of ranks gets its shard only, through its first rank.

        Raises:
            PolicyError: A rank raised or died.
        """
        commands = [command] * len(self._ranks)
        if not isinstance(command, OfSequences):
            return await self._exchange(commands)
        numbers = await asyncio.to_thread(self._assign, command)
        parallel, bare = self._config.parallel, replace(command, sequences=())
        outgoing, led = Outgoing(parallel.data), set[int]()
        parts: list[_Parts] = []
        for rank in range(parallel.num_ranks):
            number = parallel.data_rank(rank)
            parts.append(partial(_parts, bare, outgoing, number, leads=number not in led))
            led.add(number)
        encoding = asyncio.create_task(
            asyncio.to_thread(outgoing.encode, command.sequences, numbers), name="encode a batch"
        )
        try:
            return await self._exchange(commands, parts)
        finally:
            await asyncio.wait({encoding})

    def _assign(self, command: OfSequences) -> list[int]:
        """Returns the shard of each sequence."""
        parallel = self._config.parallel
        on_cpu = not self._own_devices
        return assign(
            command.sequences,
            parallel.data,
            mini_batches=(
                command.algorithm.mini_batches if isinstance(command, Update | UpdateCritic) else 1
            ),
            share_prefixes=mode_on(self._config.share_prefixes, cpu=on_cpu),
        )

    async def _exchange(
        self,
        commands: Sequence[Command | None],
        parts: Sequence[_Parts] | None = None,
    ) -> list[Any]:
        """Sends each rank its command (None: nothing to do) and returns the answers.

        Args:
            commands: By rank.
            parts: Return what to send to each rank for it, in its thread; None: the command.
        """
        assert not self._broken, "a broken policy group can only be closed"
        loop = asyncio.get_running_loop()
        if parts is None:
            payloads = {id(command): [pickle.dumps(command)] for command in commands}  # once
            parts = [partial(payloads.__getitem__, id(command)) for command in commands]

        def exchange(rank: _Rank) -> "asyncio.Future[Done | Failed | _Lost]":
            return loop.run_in_executor(self._pool, _round_trip, rank, parts[rank.number])

        asked = {
            exchange(rank): (rank, command)
            for rank, command in zip(self._ranks, commands, strict=True)
            if command is not None
        }
        waits = list(asked)
        self._broken = True  # until every answer has arrived
        pending = set(waits)
        silence = Silence(self._config.unresponsive_s)
        began, patience_s = loop.time(), self._PATIENCE_S
        next_look = began + silence.look_s
        while pending:
            ended, pending = await asyncio.wait(
                pending,
                timeout=max(0.0, min(next_look, began + patience_s) - loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if any(not isinstance(task.result(), Done) for task in ended):
                break
            if ended:
                continue
            now = loop.time()
            late = [asked[task] for task in waits if task in pending]
            if now >= next_look:
                next_look = now + silence.look_s
                dead = silence.look((rank.number, rank.signs) for rank, _ in late)
                if dead:
                    silent = [each for each in late if each[0].number in dead]
                    raise await self._dead(silent, now - began)
            if now >= began + patience_s:
                _tell_of_wait(late, silence, patience_s)
                patience_s *= 2
        if pending:  # the first failure may only be the loss of the rank that failed
            await asyncio.wait(pending, timeout=_GRACE_S)
        answers = [task.result() if task.done() else None for task in waits]
        done = [answer for answer in answers if isinstance(answer, Done)]
        if len(done) < len(answers):
            raise await self._explain(answers)
        self._broken = False
        return [answer.value for answer in done]

    async def _dead(self, ranks: Sequence[tuple[_Rank, Command]], waited_s: float) -> PolicyError:
        """Returns the error about ranks that give no sign of life."""
        limit_s = self._config.unresponsive_s
        told = [
            f"policy rank {rank.number} ({rank.process_text}) stands still: it was given "
            f"{type(command).__name__} {waited_s:.3g} s ago, and has given no sign of life for "
            f"{limit_s:g} s (policy.unresponsive_s); it gave the last one at {rank.sign.place}"
            for rank, command in ranks
        ]
        for rank, _ in ranks:
            rank.silent = True
        rank = ranks[0][0]
        tail = await rank.process.log_tail()
        return PolicyError(
            "\n".join(told) + f"\nThe log of rank {rank.number} ends with:\n{tail}", lost=True
        )

    async def _explain(self, answers: Sequence[Done | Failed | _Lost | None]) -> PolicyError:
        """Returns the failure that is not the consequence of another rank's."""

        def consequence(answer: Done | Failed | _Lost | None) -> int:
            if isinstance(answer, Failed):
                return 2 if answer.kind == "peer" else 0
            return 1 if isinstance(answer, _Lost) else 3

        number = min(range(len(answers)), key=lambda n: consequence(answers[n]))
        answer, rank = answers[number], self._ranks[number]
        if isinstance(answer, Failed) and answer.kind in ("input", "checkpoint"):
            message = answer.message.partition(": ")[2]
            return PolicyError(message, from_input=True)
        if isinstance(answer, Failed):
            limit = (
                "\n(no rank is gone; an operation with the others may take "
                f"policy.collective_timeout_s={self._config.collective_timeout_s:g})"
                if answer.kind == "peer"
                else ""
            )
            told = answer.traceback.rstrip()
            tail = await rank.process.log_tail(_TAIL + told.count("\n") + 1)
            log = tail.replace(told, "(this traceback)")  # the rank logs what it tells
            return PolicyError(
                f"policy rank {number} ({rank.process_text}) failed: {answer.message}{limit}\n"
                f"{told}\nIts log ends with:\n{log}",
                lost=answer.kind == "peer",
            )
        return await self._lost(number, rank.process, f" ({rank.process_text})")

    async def _lost(self, number: int, process: RankProcess, place: str = "") -> PolicyError:
        """Returns how a rank ended that answers no more."""
        status = await wait_until_ended(process, _GRACE_S)
        ended = f"closed its connection{place}"
        if status is not None:
            ended = process.describe_end(status)
        return PolicyError(
            f"policy rank {number} {ended}; its log ends with:\n{await process.log_tail()}",
            lost=True,
        )

    async def __aexit__(self, *exc_info: object) -> None:
        """Lets idle ranks exit by themselves, and ends those that do not."""
        if not self._broken and self._ranks:
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self.call(Stop())
            except (PolicyError, TimeoutError):
                pass  # the processes are ended below either way
        # One that stands still would not end by itself either.
        await asyncio.gather(
            *(rank.process.stop(0.0 if rank.silent else _GRACE_S) for rank in self._ranks)
        )
        for rank in self._ranks:
            rank.connection.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _connect(
    number: int,
    process: RankProcess,
    host: str,
    port: int,
    key: bytes,
    deadline_s: float,
    *,
    given_up: threading.Event,
    tls: RunTls | None,
) -> _Rank:
    connection = connect_to_rank(host, port, key, deadline_s=deadline_s, given_up=given_up, tls=tls)
    sign = connection.recv()
    assert isinstance(sign, Alive)
    return _Rank(number, process, connection, sign)


def _parts(bare: OfSequences, outgoing: Outgoing, number: int, *, leads: bool) -> Sequence[Frame]:
    """Returns what a rank gets: the command without its sequences, and as a leader their frames."""
    head = pickle.dumps(Sharded(command=bare, num_frames=outgoing.num_frames(number)))
    return [head, *outgoing.take(number)] if leads else [head]


def _round_trip(rank: _Rank, parts: _Parts) -> Done | Failed | _Lost:
    """Waits for the answer, and keeps the signs of life that come before it."""
    try:
        for part in parts():
            rank.connection.send_bytes(part)
        while isinstance(answer := rank.connection.recv(), Alive):
            rank.sign = answer
            rank.signs += 1
    except (EOFError, OSError):
        return _Lost()
    assert isinstance(answer, Done | Failed)
    return answer


def _tell_of_wait(late: Sequence[tuple[_Rank, Command]], silence: Silence, waited_s: float) -> None:
    """Says what the ranks do that have not answered: one that stands still, or one at work."""
    doing = []
    for rank, _ in late:
        silent_s = silence.silent_s(rank.number)
        if silent_s > max(2.0, 2 * silence.look_s):
            doing.append(
                f"rank {rank.number} ({rank.process_text}) has given no sign of life for "
                f"{silent_s:.3g} s"
            )
        else:
            doing.append(f"rank {rank.number} is at {rank.sign.place}")
    _log.warning(
        "no answer to %s for %g s: policy %s", type(late[0][1]).__name__, waited_s, "; ".join(doing)
    )
