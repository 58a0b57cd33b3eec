"""The driver's end of one loop worker: its process, its connection and its signs of life.

`start_worker` starts the process, connects to it, sends `Setup` and waits for `Ready`. From then on
`on_message` is called with what the worker sends, and `on_end` when its connection or its process
ends.

Who waits: `start_worker`, for the ready file and for `Ready`, each up to `launch.start_deadline_s`;
a task for the end of the process.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from treadle.policy.client.process import wait_until_ended
from treadle.policy.client.signs_of_life import beat_s
from treadle.policy.rank.driver_connection import (
    AUTHKEY_VARIABLE,
    connect_to_rank,
    tls_arguments,
)
from treadle.policy.rank.run_tls import RunTls
from treadle.trainer.launch.environment import thread_variables
from treadle.trainer.launch.process import (
    Launcher,
    LostProcessError,
    Process,
    ProcessError,
    ProcessSpec,
)
from treadle.trainer.rollout.workers.link import Link
from treadle.trainer.rollout.workers.messages import (
    Alive,
    FromWorker,
    Ready,
    Refused,
    Setup,
    Stop,
    Warned,
)

__all__ = ["LoopWorker", "start_worker"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_GRACE_S = 5.0
_EXIT_S = 2.0
_LAST_WORDS_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class LoopWorker:
    """One worker.

    Attributes:
        name: The same after a restart.
        number: Tells it from the one that it replaced.
        process: The program.
        link: To it.
        setup_done: Done when it is ready, or was refused; or lost.
        heard: How many messages it has sent.
        sign: Its latest sign of life.
        open_asks: Run -> number of tasks that it asked for and was not given.
        num_given: Run -> number of tasks that it was given and that have not ended.
        lost: Whether it is given up.
        watching: Waits for the end of the process, once it is ready.
    """

    name: str
    number: int
    process: Process
    setup_done: "asyncio.Future[None]"
    link: Link | None = None
    heard: int = 0
    sign: Alive | None = None
    open_asks: Counter[int] = field(default_factory=Counter)
    num_given: Counter[int] = field(default_factory=Counter)
    lost: bool = False
    watching: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        """Its process id and node, for a message; before it has connected, its name."""
        return self.name if self.sign is None else f"pid {self.sign.pid} on {self.sign.node}"

    def send(self, message: object) -> None:
        """Sends a message; nothing happens if the worker is gone."""
        if self.link is not None and not self.lost:
            self.link.send(message)

    async def describe_end(self, problem: str | None) -> str:
        """Returns how it ended, for a message, with the last lines of its log."""
        status = await wait_until_ended(self.process, _EXIT_S)
        if status is not None:
            problem = self.process.describe_end(status)
        tail = await self.process.log_tail(10)
        ended = problem or "closed its connection"
        return f"loop worker {self.name} ({self.place}) {ended}; its log ends with:\n{tail}"

    async def stop(self, grace_s: float = _GRACE_S) -> None:
        """Ends it."""
        if self.watching is not None:
            self.watching.cancel()
        if self.link is not None and not self.lost:
            self.link.send(Stop())
            await wait_until_ended(self.process, grace_s)
        await self.process.stop(grace_s)
        if self.link is not None:
            self.link.close()


async def start_worker(
    launcher: Launcher,
    setup: Setup,
    *,
    name: str,
    number: int,
    process_name: str,
    key: bytes,
    on_message: Callable[[LoopWorker, FromWorker], None],
    on_end: Callable[[LoopWorker, str | None], None],
) -> LoopWorker:
    """Starts a worker; returns it when it is ready for tasks.

    Args:
        launcher: Starts the process.
        setup: What it needs to know.
        name: Of the worker.
        number: Of the worker.
        process_name: Names its log.
        key: Of the run's connections.
        on_message: Called with what it says once it is ready.
        on_end: Called when its connection ends, or the process does; so it may be called twice.

    Raises:
        LostProcessError: It was killed, or ended after it had started and before it was set up.
        ProcessError: It did not start, or cannot be set up.
    """
    deadline_s = setup.config.launch.start_deadline_s
    process = await launcher.start(
        ProcessSpec(
            name=process_name,
            module="treadle.trainer.rollout.workers.worker",
            args=(
                *("--host", "{host}"),
                *("--beat_s", str(beat_s(setup.config.rollout.unresponsive_s))),
                *tls_arguments(launcher.tls),
            ),
            env={AUTHKEY_VARIABLE: key.hex(), **thread_variables(1)},
            placement="spread",
        )
    )
    worker = LoopWorker(
        name=name,
        number=number,
        process=process,
        setup_done=asyncio.get_running_loop().create_future(),
    )

    def take(message: FromWorker) -> None:
        worker.heard += 1
        match message:
            case Alive():
                worker.sign = message
            case Ready():
                if not worker.setup_done.done():
                    worker.setup_done.set_result(None)
            case Refused():
                if not worker.setup_done.done():
                    error = ProcessError(f"loop worker {name}: {message.message}")
                    worker.setup_done.set_exception(error)
            case Warned():
                _log.log(message.level, "%s: %s", name, message.message)
            case _:
                on_message(worker, message)

    ends: list[EOFError] = []

    def end(problem: str | None) -> None:
        ends.append(EOFError(problem or "it closed its connection"))
        if not worker.setup_done.done():
            worker.setup_done.set_exception(ends[0])
        on_end(worker, problem)

    try:
        address = await process.ready(deadline_s)
        async with asyncio.timeout(deadline_s):
            connection = await _connect(
                process, address, key, deadline_s=deadline_s, tls=launcher.tls
            )
            worker.link = Link(connection, on_message=take, on_end=end)
            worker.send(setup)
            await worker.setup_done
            if ends:  # it got ready and ended within one turn: `on_end` did not know it yet
                raise ends[0]
    except (AuthenticationError, EOFError, OSError, TimeoutError) as error:
        end_text = await worker.describe_end(f"did not get ready: {type(error).__name__}: {error}")
        await _give_up(worker)
        if isinstance(error, AuthenticationError | TimeoutError):
            raise ProcessError(end_text) from error
        raise LostProcessError(end_text) from error
    except BaseException:
        await _give_up(worker)
        raise
    worker.watching = asyncio.create_task(_watch(process, end), name=f"end of {process_name}")
    return worker


async def _watch(process: Process, end: Callable[[None], None]) -> None:
    """Tells that a process has ended, also where one that it forked keeps its connection open."""
    await process.wait()
    await asyncio.sleep(_LAST_WORDS_S)  # else the connection ends first, after what it sent last
    end(None)


async def _connect(
    process: Process, address: str, key: bytes, *, deadline_s: float, tls: RunTls | None
) -> "Connection[Any, Any]":
    """Connects to a worker that listens.

    Raises:
        AuthenticationError: It does not know the key.
        EOFError: It ended first.
        OSError: It cannot be reached.
    """
    host, _, port = address.rpartition(":")
    given_up = threading.Event()
    connect = partial(
        connect_to_rank, host, int(port), key, deadline_s=deadline_s, given_up=given_up, tls=tls
    )
    try:
        return await _unless_ended(process, asyncio.to_thread(connect))
    finally:
        given_up.set()


async def _unless_ended(process: Process, connecting: Coroutine[Any, Any, _T]) -> _T:
    """Waits for the connection to a process.

    Raises:
        EOFError: The process ended first.
    """
    connected = asyncio.create_task(connecting)
    ended = asyncio.create_task(process.wait())
    try:
        waits: set[asyncio.Future[Any]] = {connected, ended}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            raise EOFError("it ended before it was connected")
        return await connected
    finally:
        connected.cancel()
        ended.cancel()


async def _give_up(worker: LoopWorker) -> None:
    worker.lost = True
    await worker.stop()
