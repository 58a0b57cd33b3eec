"""SGLang's processes, started from ours: its engine without what would take ours over.

Invariant: SGLang handles no signal here, sets up no logging, ends no process that is not its
own, and whatever happens to its schedulers is an exception here. Its parent part runs on the
server's event loop; starting and ending block, and happen on a thread of their own.

Who wakes whom: a message of a scheduler wakes the listening task, which wakes who waits for
an answer or for tokens. A scheduler that ends wakes the loop through its descriptor, and so
does the signal by which SGLang's processes say that they are in trouble.

The thread lives as long as the schedulers: the kernel ends them with the thread that started
them, and so with the server, however it goes.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.engine import (
    Engine,
    init_tokenizer_manager,
)
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    ShutdownReq,
    UpdateWeightsFromIPCReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

from treadle.rollout_server.engines.common.runtime_dir import Scratch
from treadle.rollout_server.engines.sglang.startup import ProcessSetup, run_scheduler
from treadle.rollout_server.engines.sglang.weights import decode_problems
from treadle.rollout_server.errors import CollectiveBroken

_log = logging.getLogger(__name__)
_END_S = 10.0  # A scheduler that is asked to end gets so long to leave its GPU.

ARGUMENT_NAMES = frozenset(ServerArgs.__struct_fields__)
"""What `ServerArgs` can be told."""


class SchedulerEnded(RuntimeError):
    """A scheduler process is gone, or is in trouble."""


class Schedulers:
    """SGLang's scheduler processes, and messages to and from them.

    Args:
        arguments: Of `ServerArgs`.
        setup: How a process is prepared.
        thread: On which this is made; ended by `aclose`.
        scratch: For SGLang's sockets; closed by `aclose`.

    Raises:
        ValueError: SGLang refuses the arguments, or cannot serve them.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        setup: ProcessSetup,
        thread: ThreadPoolExecutor,
        scratch: Scratch,
    ) -> None:
        self._setup = setup
        self._thread = thread
        self._scratch = scratch
        before = set(multiprocessing.active_children())
        try:
            with _logging_kept(), _files_in(scratch.path):
                self._engine = _Engine(arguments, setup)
        except Exception as error:
            ended = set(multiprocessing.active_children()) - before
            _kill(ended)
            cause = self._reported() or f"{type(error).__name__}: {error}"
            raise ValueError(f"sglang cannot start: {cause}") from error
        self._manager: _Manager = self._engine.tokenizer_manager
        self._processes = set(multiprocessing.active_children()) - before
        self._watched: list[int] = []
        self._signalled = False

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that SGLang takes, as its context and its cache allow."""
        return int(self._manager.max_req_input_len)

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Listens, from the running loop; calls `failed` when something breaks."""
        loop = asyncio.get_running_loop()
        self._manager.listen(failed)
        # With data parallelism these are also the children of one of ours.
        for pid in self._engine.get_all_child_pids():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended(pid, failed)
                continue
            self._watched.append(descriptor)
            loop.add_reader(descriptor, self._on_end, descriptor, pid, failed)
        trouble = SchedulerEnded("a process of SGLang reported trouble by SIGQUIT; see its log")
        with contextlib.suppress(ValueError):  # A signal comes to the main thread only.
            loop.add_signal_handler(signal.SIGQUIT, failed, trouble)
            self._signalled = True

    async def generate(
        self, rid: str, prompt: tuple[int, ...], sampling: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The answers to a request; it is with SGLang when the first is asked for."""
        answers: AsyncGenerator[dict[str, Any], None] = await self._engine.async_generate(
            input_ids=list(prompt),
            sampling_params=sampling,
            return_logprob=True,
            stream=True,
            rid=rid,
        )
        return answers

    def received(self, rid: str) -> int | None:
        """Tokens that have come of a request that has not ended; None: it has, or is unknown."""
        state = self._manager.rid_to_state.get(rid)
        return None if state is None else len(state.output_ids)

    async def abort(self, rid: str) -> None:
        """Ends a request; returns when its place is free. Nothing if it has ended."""
        state = self._manager.rid_to_state.get(rid)
        if state is None:
            return
        self._manager.abort_request(rid)
        while rid in self._manager.rid_to_state:
            state.event.clear()
            await state.event.wait()

    def abort_all(self) -> None:
        """Ends every request that the schedulers have; each still gets its last answer."""
        self._manager._dispatch_to_scheduler(AbortReq(rid="", abort_all=True))

    def cut_off(self) -> None:
        """Gives every request its last answer from here: no scheduler will."""
        for rid in list(self._manager.rid_to_state):
            self._manager._handle_abort_req(AbortReq(rid=rid))

    async def stop(self) -> None:
        """Takes all sequences off the device; returns when every token of theirs is here."""
        self._manager._dispatch_to_scheduler(PauseGenerationReqInput(mode="retract"))
        await self.command("settle")

    def go_on(self) -> None:
        """Ends `stop`."""
        self._manager._dispatch_to_scheduler(ContinueGenerationReqInput())

    async def command(self, name: str, message: str = "") -> None:
        """Has every worker obey; see `worker.py`.

        Raises:
            CollectiveBroken: The group ended from which they received; nothing else is wrong.
            RuntimeError: One could not.
        """
        order = UpdateWeightsFromIPCReqInput(zmq_handles={name: message})
        answers = await self._manager.update_weights_from_ipc_communicator(order)
        problems = [one for answer in answers for one in decode_problems(answer.message)]
        causes = "; ".join(sorted({problem.cause for problem in problems}))
        if problems and all(problem.broken_group for problem in problems):
            raise CollectiveBroken(causes)
        if problems:
            raise RuntimeError(f"sglang cannot {name}: {causes}")

    async def release(self, tags: list[str]) -> None:
        """Gives device memory of these kinds away; SGLang's words for them."""
        order = ReleaseMemoryOccupationReqInput(tags=tags)
        await self._manager.release_memory_occupation_communicator(order)

    async def restore(self, tags: list[str]) -> None:
        """Takes it back."""
        order = ResumeMemoryOccupationReqInput(tags=tags)
        await self._manager.resume_memory_occupation_communicator(order)

    async def aclose(self) -> None:
        """Ends the processes, and what listened to them. Once."""
        loop = asyncio.get_running_loop()
        for descriptor in self._watched:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        if self._signalled:
            loop.remove_signal_handler(signal.SIGQUIT)
        self._manager._dispatch_to_scheduler(ShutdownReq())
        await self._manager.unlisten()
        await loop.run_in_executor(self._thread, self._end)
        self._thread.shutdown(wait=False)

    def _end(self) -> None:
        deadline = time.monotonic() + (0.0 if self._setup.cpu else _END_S)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        _kill(self._processes)
        self._engine.close()
        self._scratch.close()

    def _on_end(self, descriptor: int, pid: int, failed: Callable[[Exception], None]) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)  # It would be readable for ever.
        self._ended(pid, failed)

    def _ended(self, pid: int, failed: Callable[[Exception], None]) -> None:
        how = "is gone"
        for process in self._processes:
            if process.pid == pid:
                process.join()  # It is a zombie; this asks how it ended.
                how = _end_of(process)
        cause = self._reported() or "it left no word of why, see its log"
        failed(SchedulerEnded(f"scheduler process {pid} {how}: {cause}"))

    def _reported(self) -> str:
        """What schedulers left word of before they ended."""
        return "; ".join(path.read_text() for path in sorted(self._setup.reports.iterdir()))


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _kill(processes: set[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    """SGLang sets up the root logger as if the process were its own."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    # It closes the handlers that it finds.
    root.handlers.clear()
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextlib.contextmanager
def _files_in(directory: Path) -> Iterator[None]:
    """SGLang makes its sockets where temporary files go, and leaves them there."""
    before = tempfile.tempdir
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


class _Manager(TokenizerManager):  # type: ignore[misc]
    """SGLang's parent part, on a loop and among signal handlers that are not its own."""

    _listening: asyncio.Task[None] | None = None

    def auto_create_handle_loop(self) -> None:
        """Does nothing: SGLang would take over SIGTERM here, and end us when it fails."""
        assert self._listening is not None, "listen first"

    def listen(self, failed: Callable[[Exception], None]) -> None:
        """Takes the schedulers' messages, from the running loop, until `unlisten`."""
        self.event_loop = asyncio.get_running_loop()
        self._listening = self.event_loop.create_task(self._listen(failed), name="sglang listener")

    async def unlisten(self) -> None:
        """Ends `listen`."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait({self._listening})

    async def _listen(self, failed: Callable[[Exception], None]) -> None:
        try:
            await self.handle_loop()
        except Exception as error:
            failed(error)


class _Engine(Engine):  # type: ignore[misc]
    """SGLang's engine, with our scheduler and our manager, and without a detokenizer."""

    def __init__(self, arguments: Mapping[str, Any], setup: ProcessSetup) -> None:
        self.run_scheduler_process_func = partial(run_scheduler, setup)
        self.init_tokenizer_manager_func = partial(
            init_tokenizer_manager, TokenizerManagerClass=_Manager
        )
        super().__init__(**arguments)
        # It would end this process with the first scheduler that ends; `Schedulers` watches.
        self.tokenizer_manager._subprocess_watchdog.stop()

    @classmethod
    def _launch_detokenizer_subprocesses(
        cls, *_: object, **__: object
    ) -> tuple[list[BaseProcess], list[str]]:
        return [], []  # Ids go straight from the scheduler to us.

    def shutdown(self) -> None:
        """Does nothing: SGLang would end every child of this process, at its exit at the latest."""

    def close(self) -> None:
        """Closes the sockets when the processes have ended."""
        manager = self.tokenizer_manager
        for socket in (self.send_to_rpc, manager.recv_from_detokenizer, manager.send_to_scheduler):
            socket.close(linger=0)
