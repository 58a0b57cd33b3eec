"""Starts SGLang's processes, without the parts of SGLang that would take over ours.

Invariant: SGLang installs no signal handler here, configures no logging and kills no process
but its own; every failure of its schedulers becomes an exception here. Its tokenizer manager
runs on the server's event loop; start and shutdown block, so they run on a separate thread.

Who wakes whom: a message of a scheduler wakes the listening task, which wakes the waiters for
answers and tokens. A scheduler that ends wakes the event loop through its pidfd, and so does
the signal by which SGLang's processes report failures.

The thread lives as long as the schedulers: the kernel kills them with the thread that started
them, and so with the server, however it ends.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.process import BaseProcess
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

from treadle.rollout_server.engine import EngineRequest
from treadle.rollout_server.engines.common.runtime_dir import RuntimeDir, files_in
from treadle.rollout_server.engines.images.inputs import ImageInput
from treadle.rollout_server.engines.sglang.sequence import logprob_start
from treadle.rollout_server.engines.sglang.startup import ProcessSetup, run_scheduler
from treadle.rollout_server.engines.sglang.vision import multimodal_inputs
from treadle.rollout_server.engines.sglang.weights import decode_errors
from treadle.rollout_server.errors import CollectiveBroken

_log = logging.getLogger(__name__)
_SHUTDOWN_S = 10.0  # Time for a scheduler to release its GPU before it is killed.

ARGUMENT_NAMES = frozenset(ServerArgs.__struct_fields__)
"""The argument names of `ServerArgs`."""


class SchedulerDied(RuntimeError):
    """A scheduler process ended, or reported a failure."""


class Schedulers:
    """SGLang's scheduler processes, and messages to and from them.

    Args:
        thread: The thread that runs this constructor; ended by `aclose`.
        runtime_dir: Directory of SGLang's sockets; closed by `aclose`.

    Raises:
        ValueError: SGLang rejects the arguments, or fails to start with them.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        setup: ProcessSetup,
        thread: ThreadPoolExecutor,
        runtime_dir: RuntimeDir,
    ) -> None:
        self._setup = setup
        self._thread = thread
        self._runtime_dir = runtime_dir
        before = set(multiprocessing.active_children())
        try:
            with _logging_kept(), files_in(runtime_dir.path):
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
        """Maximum prompt length that SGLang's context and KV cache allow, in tokens."""
        return int(self._manager.max_req_input_len)

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Starts to listen on the running event loop; calls `failed` on a failure."""
        loop = asyncio.get_running_loop()
        self._manager.listen(failed)
        # With data parallelism, children of children are included.
        for pid in self._engine.get_all_child_pids():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended(pid, failed)
                continue
            self._watched.append(descriptor)
            loop.add_reader(descriptor, self._on_end, descriptor, pid, failed)
        trouble = SchedulerDied("a process of SGLang reported a failure by SIGQUIT; see its log")
        with contextlib.suppress(ValueError):  # Only the main thread can handle signals.
            loop.add_signal_handler(signal.SIGQUIT, failed, trouble)
            self._signalled = True

    async def generate(
        self,
        rid: str,
        request: EngineRequest,
        sampling: dict[str, Any],
        images: Sequence[ImageInput],
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Returns the answers to a request, which is sent when the first one is awaited."""
        if images:
            placeholder_id = self._manager.model_config.hf_config.image_token_id
            inputs = multimodal_inputs(request, images, placeholder_id=placeholder_id)
            self._manager.images[rid] = inputs
        answers: AsyncGenerator[dict[str, Any], None] = await self._engine.async_generate(
            input_ids=list(request.prompt),
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=logprob_start(request),
            return_routed_experts=request.routed_experts_from is not None,
            routed_experts_start_len=request.routed_experts_from or 0,
            stream=True,
            rid=rid,
        )
        return answers

    def received(self, rid: str) -> int | None:
        """Number of tokens received for a running request; None if it ended or is unknown."""
        state = self._manager.rid_to_state.get(rid)
        return None if state is None else len(state.output_ids)

    async def abort(self, rid: str) -> None:
        """Aborts a request; returns when it has left the batch. Does nothing if it has ended."""
        state = self._manager.rid_to_state.get(rid)
        if state is None:
            return
        self._manager.abort_request(rid)
        while rid in self._manager.rid_to_state:
            state.event.clear()
            await state.event.wait()

    def abort_all(self) -> None:
        """Aborts every request in the schedulers; each still gets its last answer."""
        self._manager._dispatch_to_scheduler(AbortReq(rid="", abort_all=True))

    def abort_locally(self) -> None:
        """Gives every request its last answer without the schedulers, which have ended."""
        for rid in list(self._manager.rid_to_state):
            self._manager._handle_abort_req(AbortReq(rid=rid))

    async def pause_generation(self) -> None:
        """Removes all sequences from the device; returns once all their tokens have arrived."""
        self._manager._dispatch_to_scheduler(PauseGenerationReqInput(mode="retract"))
        await self.command("settle")

    def continue_generation(self) -> None:
        """Undoes `pause_generation`."""
        self._manager._dispatch_to_scheduler(ContinueGenerationReqInput())

    async def command(self, name: str, message: str = "") -> None:
        """Runs a command in every worker; see `worker.py`.

        Raises:
            CollectiveBroken: The collective group ended; the workers themselves still work.
            RuntimeError: The command failed in a worker.
        """
        order = UpdateWeightsFromIPCReqInput(zmq_handles={name: message})
        answers = await self._manager.update_weights_from_ipc_communicator(order)
        errors = [one for answer in answers for one in decode_errors(answer.message)]
        causes = "; ".join(sorted({error.cause for error in errors}))
        if errors and all(error.broken_group for error in errors):
            raise CollectiveBroken(causes)
        if errors:
            raise RuntimeError(f"command {name} failed in sglang: {causes}")

    async def release_memory(self, tags: list[str]) -> None:
        """Releases device memory; `tags` are SGLang's names for the kinds."""
        order = ReleaseMemoryOccupationReqInput(tags=tags)
        await self._manager.release_memory_occupation_communicator(order)

    async def restore_memory(self, tags: list[str]) -> None:
        """Restores released memory."""
        order = ResumeMemoryOccupationReqInput(tags=tags)
        await self._manager.resume_memory_occupation_communicator(order)

    async def aclose(self) -> None:
        """Ends the processes and stops listening. Must be called at most once."""
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
        deadline = time.monotonic() + (0.0 if self._setup.cpu else _SHUTDOWN_S)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        _kill(self._processes)
        self._engine.close()
        self._runtime_dir.close()

    def _on_end(self, descriptor: int, pid: int, failed: Callable[[Exception], None]) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)  # It stays readable forever.
        self._ended(pid, failed)

    def _ended(self, pid: int, failed: Callable[[Exception], None]) -> None:
        how = "ended"
        for process in self._processes:
            if process.pid == pid:
                process.join()  # Reaps the zombie, which sets the exit code.
                how = _end_of(process)
        cause = self._reported() or "no cause was recorded, see its log"
        failed(SchedulerDied(f"scheduler process {pid} {how}: {cause}"))

    def _reported(self) -> str:
        """Returns the causes that schedulers recorded before they ended."""
        return "; ".join(path.read_text() for path in sorted(self._setup.reports.iterdir()))


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _kill(processes: set[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    """Restores the root logger, which SGLang reconfigures."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    # It closes existing handlers.
    root.handlers.clear()
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


class _Manager(TokenizerManager):  # type: ignore[misc]
    """SGLang's tokenizer manager, without its own event loop, signal handlers and processors.

    Attributes:
        images: Multimodal inputs of requests that are not yet sent, by request id.
    """

    _listening: asyncio.Task[None] | None = None
    images: dict[str, Any]

    def init_tokenizer_and_processor(self) -> None:
        """Builds neither: SGLang's processor of a vision model would tokenize prompts again."""
        self.images = {}
        self.tokenizer = self.processor = self.mm_processor = None
        self.async_dynamic_batch_tokenizer = None

    def _create_tokenized_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds our inputs of the request's images."""
        tokenized = super()._create_tokenized_object(obj, *args, **kwargs)
        tokenized.mm_inputs = self.images.pop(obj.rid, None)
        return tokenized

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """Adds the experts, which SGLang leaves out of its last answer to an aborted request."""
        state = self.rid_to_state.get(recv_obj.rid)
        super()._handle_abort_req(recv_obj)
        if state is not None:
            state.out_list[-1]["meta_info"].update(state.customized_info_accumulated)

    def auto_create_handle_loop(self) -> None:
        """Does nothing: SGLang would handle SIGTERM here, and kill this process on a failure."""
        assert self._listening is not None, "listen first"

    def listen(self, failed: Callable[[Exception], None]) -> None:
        """Receives the schedulers' messages on the running event loop, until `unlisten`."""
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
    """SGLang's engine with our scheduler and tokenizer manager, and without a detokenizer."""

    def __init__(self, arguments: Mapping[str, Any], setup: ProcessSetup) -> None:
        self.run_scheduler_process_func = partial(run_scheduler, setup)
        self.init_tokenizer_manager_func = partial(
            init_tokenizer_manager, TokenizerManagerClass=_Manager
        )
        super().__init__(**arguments)
        # It would kill this process when a scheduler ends; `Schedulers` watches them instead.
        self.tokenizer_manager._subprocess_watchdog.stop()

    @classmethod
    def _launch_detokenizer_subprocesses(
        cls, *_: object, **__: object
    ) -> tuple[list[BaseProcess], list[str]]:
        return [], []  # Token ids go directly from the scheduler to the server.

    def shutdown(self) -> None:
        """Does nothing: SGLang would kill every child of this process, at exit at the latest."""

    def close(self) -> None:
        """Closes the sockets once the processes have ended."""
        manager = self.tokenizer_manager
        for socket in (self.send_to_rpc, manager.recv_from_detokenizer, manager.send_to_scheduler):
            socket.close(linger=0)
