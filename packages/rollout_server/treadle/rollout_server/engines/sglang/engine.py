"""The SGLang engine: an `Engine` over SGLang's schedulers.

Invariant: SGLang has a sequence exactly while it holds a slot here, so waiting requests can be
ordered by priority and held back by a pause. A pause removes every sequence from the device and
returns once their last tokens have arrived. A sequence kept by CONTINUE is prefilled again with
the weights of that time, so it never continues from old keys and values.

Who waits: `generate` waits for threads that decode and cut the images of its prompt, then for a
slot, then for answers, which SGLang's tokenizer manager
buffers (at most one completion). `pause` waits for the sequences that its policy ends and for
one answer of the schedulers; `load_weights` waits for an answer per batch. The failure of a
scheduler wakes every waiter with `EngineFailed`.
"""

import asyncio
import itertools
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from treadle.rollout_server.engine import (
    CollectiveGroup,
    EngineCounters,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    MemoryKind,
    NamedTensor,
    Started,
    TensorSpec,
)
from treadle.rollout_server.engines.common.collective_group import encode_group, fail_group
from treadle.rollout_server.engines.common.staging import Staging, staging
from treadle.rollout_server.engines.sglang import sequence, weights
from treadle.rollout_server.errors import CollectiveBroken, EngineFailed, ShuttingDown
from treadle.rollout_server.scheduling.admission import Admission
from treadle.rollout_server.scheduling.request_queue import RequestQueue
from treadle.rollout_server.tensors import TensorCheck, check_tensors

if TYPE_CHECKING:  # It imports transformers, which may need the stubs of `startup.py` first.
    from treadle.rollout_server.engines.images.inputs import ImageInput, ImageInputs

_log = logging.getLogger(__name__)
_BATCH_BYTES = 256 << 20  # Maximum of staged tensors in one message to the workers.
_ALL = sys.maxsize


class SglangEngine:
    """An `Engine` over SGLang's schedulers. Created by `launch.create`.

    Args:
        max_running: Maximum number of running sequences.
        host_cache: Whether the KV cache is in host memory.
        images: Reads the images of prompts; None for a text model.
    """

    def __init__(
        self,
        info: EngineInfo,
        schedulers: Any,
        *,
        max_running: int,
        host_cache: bool,
        images: "ImageInputs | None" = None,
    ) -> None:
        self.info = info
        self._schedulers = schedulers
        self._images = images
        self._host_cache = host_cache
        loop = asyncio.get_running_loop()
        self._queue = RequestQueue(Admission(max_in_flight=max_running, max_queued=_ALL), loop)
        self._failure: asyncio.Future[Exception] = loop.create_future()
        self._calls: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._sequences: dict[str, sequence.Sequence] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._weight_version = 0
        self._stopped = False
        self._mixed = False
        self._released: frozenset[MemoryKind] = frozenset()
        self._closed = False
        self._started = self._finished = self._aborted = 0
        schedulers.watch(self._fail)

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._weight_version

    @property
    def counters(self) -> EngineCounters:
        """Numbers of sequences since the start, by outcome."""
        return EngineCounters(
            started=self._started,
            finished=self._finished,
            aborted=self._aborted,
            running=len(self._sequences),
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one sequence; see `Engine.generate`."""
        self._check()
        sequence.check_supported(request)
        images = await self._read_images(request)
        rejected = self._closed
        try:
            if not rejected:
                async with (
                    self._queue.slot(request.priority) as slot,
                    aclosing(self._run(request, images)) as events,
                ):
                    slot.started()
                    async for event in events:
                        yield event
        except ShuttingDown:
            rejected = True
        if rejected:
            self._started += 1
            self._finished += 1
            yield Started(0)
            yield Finished(FinishReason.INTERRUPTED)

    async def _read_images(self, request: EngineRequest) -> "Sequence[ImageInput]":
        if not request.images:
            return ()
        assert self._images is not None, "the capabilities exclude images"
        return await self._images.read(request)

    async def _run(
        self, request: EngineRequest, images: "Sequence[ImageInput]"
    ) -> AsyncGenerator[EngineEvent, None]:
        running = sequence.Sequence(request, f"{next(self._numbers):016x}")
        self._sequences[running.rid] = running
        self._idle.clear()
        self._started += 1
        ended = False
        settings = sequence.sampling_params(request, self.info.model.eos_token_ids)
        try:
            stream = await self._schedulers.generate(running.rid, request, settings, images)
            async with aclosing(stream) as answers:
                async for answer in answers:
                    self._check()
                    for event in running.read(answer, self._weight_version):
                        if isinstance(event, Finished):
                            ended = True
                            self._leave(running, finished=True)
                        yield event
        finally:
            if not ended:
                try:
                    if not self._closed:
                        await self._unless_failed(self._schedulers.abort(running.rid))
                finally:
                    self._leave(running, finished=False)

    async def pause(self, policy: InFlightPolicy) -> None:
        """Pauses sampling; see `Engine.pause`."""
        self._queue.pause_admission()
        # Nothing may be sampled from a mixture, so sequences kept by CONTINUE stay kept.
        if policy is InFlightPolicy.DRAIN and not self._mixed:
            if self._stopped:
                self._continue_generation()
            await self._idle.wait()
        self._stopped = True
        await self._unless_failed(self._schedulers.pause_generation())
        if policy is InFlightPolicy.INTERRUPT:
            for running in self._sequences.values():
                running.interrupted = True
            self._schedulers.abort_all()
            await self._idle.wait()
        self._check()

    async def resume(self) -> None:
        """Resumes sampling; see `Engine.resume`."""
        if self._mixed:
            raise RuntimeError("the weights are a mixture: load all of them before resuming")
        if self._released:
            names = ", ".join(sorted(kind.value for kind in self._released))
            raise RuntimeError(f"memory is released ({names}): restore it before resuming")
        self._check()
        if self._stopped:
            self._continue_generation()
        self._queue.resume_admission()

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        """Replaces all weights; see `Engine.load_weights`.

        If not in place, a tensor that a worker cannot load breaks the engine: SGLang has
        overwritten other tensors by then.
        """
        check = TensorCheck(self.info.parameters)
        with staging() as memory:
            if in_place:
                await self._begin_load()
                async for tensor in tensors:
                    check.add(tensor.spec)
                    await self._load([tensor], memory)
                check.finish()
                await self._end_load(version)
                return
            staged: list[NamedTensor] = []
            async for tensor in tensors:
                check.add(tensor.spec)
                staged.append(tensor)
            check.finish()
            try:
                await self._begin_load()
                for batch in weights.split_batches(staged, _BATCH_BYTES):
                    await self._load(batch, memory)
                await self._end_load(version)
            except (RuntimeError, OSError) as error:
                raise EngineFailed("sglang", error) from error

    async def receive_weights(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec], *, version: int
    ) -> None:
        """Replaces all weights by what a group sends; see `Engine.receive_weights`."""
        check_tensors(self.info.parameters, tensors)
        await self._begin_load()
        message = encode_group(group, tensors)
        receiving = asyncio.create_task(self._command("receive", message))
        try:
            await asyncio.shield(receiving)
        except asyncio.CancelledError:
            # The workers process no messages while they receive.
            await asyncio.to_thread(fail_group, group, "its server gave the update up")
            await asyncio.wait({receiving})
            # A worker that could not write ended the group before it said so: this is the cause.
            if not isinstance(error := receiving.exception(), CollectiveBroken | None):
                raise error from None
            raise
        await self._end_load(version)

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Releases device memory; see `Engine.release_memory`."""
        kinds -= self._released
        if not kinds:
            return
        self._released |= kinds
        await self._unless_failed(self._schedulers.release_memory(_tags(kinds)))
        if self._host_cache and MemoryKind.KV_CACHE in kinds:
            await self._unless_failed(self._schedulers.command("release_host_cache"))

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Restores device memory; see `Engine.restore_memory`."""
        kinds &= self._released
        if not kinds:
            return
        if self._host_cache and MemoryKind.KV_CACHE in kinds:
            await self._unless_failed(self._schedulers.command("restore_host_cache"))
        await self._unless_failed(self._schedulers.restore_memory(_tags(kinds)))
        self._released -= kinds

    async def wait_failed(self) -> Exception:
        """Waits for a scheduler to fail; see `Engine.wait_failed`."""
        return await asyncio.shield(self._failure)

    async def aclose(self) -> None:
        """Ends all sequences as INTERRUPTED, then the schedulers."""
        if self._closed:
            return
        self._closed = True
        if self._images is not None:
            self._images.close()
        for running in self._sequences.values():
            running.interrupted = True
        self._queue.reject_waiting(ShuttingDown())
        self._schedulers.abort_locally()
        await self._schedulers.aclose()

    async def _begin_load(self) -> None:
        await self._command("begin_load")
        self._mixed = True

    async def _load(self, batch: list[NamedTensor], memory: Staging) -> None:
        # Every worker has read the previous batch, so its memory can be reused.
        entries = await asyncio.to_thread(
            lambda: [memory.entry(tensor, reuse=index == 0) for index, tensor in enumerate(batch)]
        )
        await self._command("load", weights.encode_batch(entries))

    async def _end_load(self, version: int) -> None:
        await self._command("end_load")
        for running in self._sequences.values():
            count = self._schedulers.received(running.rid)
            running.mark(_ALL if count is None else count, self._weight_version)
        self._weight_version = version
        self._mixed = False

    async def _command(self, name: str, message: str = "") -> None:
        await self._unless_failed(self._schedulers.command(name, message))

    async def _unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits for an answer of the schedulers; a cancelled wait leaves the call running.

        Raises:
            EngineFailed: A scheduler failed first.
        """
        call = asyncio.create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._forget)
        # A cancelled wait must not cancel the call: the next call would receive its answer.
        waits: set[asyncio.Future[Any]] = {call, self._failure}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            self._check()
        call.result()

    def _forget(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # Retrieved, or asyncio would log it if nothing waits any more.

    def _continue_generation(self) -> None:
        self._schedulers.continue_generation()
        self._stopped = False

    def _leave(self, running: sequence.Sequence, *, finished: bool) -> None:
        del self._sequences[running.rid]
        self._finished += finished
        self._aborted += not finished
        if not self._sequences:
            self._idle.set()

    def _check(self) -> None:
        if self._failure.done():
            cause = self._failure.result()
            raise EngineFailed("sglang", cause) from cause

    def _fail(self, error: Exception) -> None:
        if self._closed or self._failure.done():
            return
        _log.error("%s", error)
        self._failure.set_result(error)
        self._queue.pause_admission()
        self._queue.reject_waiting(EngineFailed("sglang", error))
        self._schedulers.abort_locally()


def _tags(kinds: frozenset[MemoryKind]) -> list[str]:
    """Returns SGLang's names of memory kinds."""
    return sorted(kind.value for kind in kinds)
