"""The driver's end of one loop worker: its process, its stream and its signs of life.

`start_worker` starts the process, connects to it, sends `Setup` and waits for `Ready`. From then on
`on_message` is called with what the worker sends, and `on_end` when its stream or its process ends.

Who waits: `start_worker`, for the ready file and for `Ready`, each up to `launch.start_deadline_s`;
a task for the end of the process.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from treadle.agent_loop.rpc.driven import DrivenAccess
from treadle.agent_loop.rpc.driver_stream import DriverEnd
from treadle.loop_worker.v1 import loop_worker_service_pb2 as pb
from treadle.loop_worker.v1.loop_worker_service_pb2_grpc import LoopWorkerServiceStub
from treadle.policy.client.process import wait_until_ended, with_log
from treadle.policy.client.signs_of_life import beat_s
from treadle.trainer.launch.environment import thread_variables
from treadle.trainer.launch.process import (
    Launcher,
    LostProcessError,
    Process,
    ProcessError,
    ProcessSpec,
)
from treadle.trainer.rollout.workers.messages import WORKER_SETTINGS, WorkerSettings
from treadle.trainer.rollout.workers.plain_values import from_wire

__all__ = ["LoopWorker", "start_worker"]

_log = logging.getLogger(__name__)
_GRACE_S = 5.0
_EXIT_S = 2.0
_LAST_WORDS_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class LoopWorker:
    """One worker.

    Attributes:
        name: The same after a restart.
        number: Distinguishes it from the one that it replaced.
        on_message: Called with what it sends once it is ready.
        on_end: Called when its stream ends, or the process does; so it may be called twice.
        stream: Its stream; None before it is connected.
        setup_done: Done when it is ready, or was refused; or lost.
        heard: How many messages it has sent.
        sign: Its latest sign of life.
        open_asks: Run -> number of tasks that it requested and was not given.
        num_given: Run -> number of tasks that it was given and that have not ended.
        lost: Whether it is given up.
        watching: Waits for the end of the process, once it is ready.
    """

    name: str
    number: int
    process: Process
    on_message: "Callable[[LoopWorker, pb.Event], None]"
    on_end: "Callable[[LoopWorker, str | None], None]"
    setup_done: "asyncio.Future[None]"
    stream: DriverEnd | None = None
    heard: int = 0
    sign: pb.Alive | None = None
    open_asks: Counter[int] = field(default_factory=Counter)
    num_given: Counter[int] = field(default_factory=Counter)
    lost: bool = False
    watching: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        """Its process id and node, for a message; before it has connected, its name."""
        return self.name if self.sign is None else f"pid {self.sign.pid} on {self.sign.node}"

    def connect(self, access: DrivenAccess, address: str) -> None:
        """Opens its stream."""
        self.stream = DriverEnd(
            access,
            address,
            lambda channel: LoopWorkerServiceStub(channel).Work,
            split=attrgetter("events"),
            join=lambda commands: pb.WorkRequest(commands=commands),
            on_message=self.take,
            on_end=self.end,
        )

    def send(self, message: pb.Command) -> None:
        """Sends a message; nothing happens if the worker is gone."""
        if self.stream is not None and not self.lost:
            self.stream.send(message)

    def take(self, event: pb.Event) -> None:
        """Takes a message of it."""
        self.heard += 1
        match event.WhichOneof("message"):
            case "alive":
                self.sign = event.alive
            case "ready":
                if not self.setup_done.done():
                    self.setup_done.set_result(None)
            case "refused":
                if not self.setup_done.done():
                    text = f"loop worker {self.name}: {from_wire(event.refused.message)}"
                    self.setup_done.set_exception(ProcessError(text))
            case "warned":
                warned = event.warned
                _log.log(warned.level, "%s: %s", self.name, from_wire(warned.message))
            case _:
                self.on_message(self, event)

    def end(self, problem: str | None) -> None:
        """Takes the end of its stream or of its process."""
        if not self.setup_done.done():
            self.setup_done.set_exception(EOFError(problem or "it ended its stream"))
        self.on_end(self, problem)

    async def describe_end(self, problem: str | None) -> str:
        """Returns how it ended, for a message, with the last lines of its log."""
        status = await wait_until_ended(self.process, _EXIT_S)
        if status is not None:
            problem = self.process.describe_end(status)
        ended = problem or "closed its connection"
        return await with_log(self.process, f"loop worker {self.name} ({self.place}) {ended}")

    async def stop(self, grace_s: float = _GRACE_S) -> None:
        """Ends it."""
        if self.watching is not None:
            self.watching.cancel()
        if self.stream is not None and not self.lost:
            self.stream.send(pb.Command(stop=pb.Stop()))
            await wait_until_ended(self.process, grace_s)
        await self.process.stop(grace_s)
        if self.stream is not None:
            await self.stream.aclose()


async def start_worker(
    launcher: Launcher,
    settings: WorkerSettings,
    *,
    name: str,
    number: int,
    process_name: str,
    access: DrivenAccess,
    on_message: Callable[[LoopWorker, pb.Event], None],
    on_end: Callable[[LoopWorker, str | None], None],
) -> LoopWorker:
    """Starts a worker; returns it when it is ready for tasks.

    Args:
        access: How the run's workers are reached.

    Raises:
        LostProcessError: It was killed, or ended after it had started and before it was set up.
        ProcessError: It did not start, or cannot be set up.
    """
    deadline_s = settings.config.launch.start_deadline_s
    beat = beat_s(settings.config.rollout.unresponsive_s)
    process = await launcher.start(
        ProcessSpec(
            name=process_name,
            module="treadle.trainer.rollout.workers.worker",
            args=(*access.arguments, "--beat_s", str(beat)),
            env={**access.environment, **thread_variables(1)},
            placement="spread",
        )
    )
    worker = LoopWorker(
        name=name,
        number=number,
        process=process,
        on_message=on_message,
        on_end=on_end,
        setup_done=asyncio.get_running_loop().create_future(),
    )

    try:
        address = await process.ready(deadline_s)
        async with asyncio.timeout(deadline_s):
            worker.connect(access, address)
            worker.send(pb.Command(setup=pb.Setup(settings=WORKER_SETTINGS.dump_json(settings))))
            await worker.setup_done
    except (EOFError, OSError) as error:
        end_text = await worker.describe_end(f"did not get ready: {type(error).__name__}: {error}")
        await _give_up(worker)
        # A timeout is an OSError.
        kind = ProcessError if isinstance(error, TimeoutError) else LostProcessError
        raise kind(end_text) from error
    except BaseException:
        await _give_up(worker)
        raise
    worker.watching = asyncio.create_task(
        _watch(process, worker.end), name=f"end of {process_name}"
    )
    return worker


async def _watch(process: Process, end: Callable[[None], None]) -> None:
    """Calls `end` after the process has ended, even if a forked one keeps its stream open."""
    await process.wait()
    await asyncio.sleep(_LAST_WORDS_S)  # else the stream ends first, after what it sent last
    end(None)


async def _give_up(worker: LoopWorker) -> None:
    worker.lost = True
    await worker.stop()
