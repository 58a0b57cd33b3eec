"""The torch engine: a Hugging Face model in the server's process, with continuous batching.

Invariant: the event loop never computes. Every method here posts to the compute thread, which
steps an `EngineCore`, and awaits the result; see `compute_thread.py` for who wakes whom.

Who waits: `generate` waits for threads that decode the images of its prompt, then for events,
which its own queue buffers (at most one completion: the engine does not wait for a slow
reader). `pause` waits for the running sequences. `receive_weights` waits for all buckets; to
cancel it ends the group for all its members. All other methods wait for at most one step.
Closing a generator returns once the cache row of its sequence is free.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from importlib.metadata import version as package_version

import torch
from transformers.utils.logging import disable_progress_bar

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    CollectiveGroup,
    ElementType,
    EngineCapabilities,
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
from treadle.rollout_server.engines.common.arguments import reject_unsupported
from treadle.rollout_server.engines.common.collective import CollectiveMember, Received
from treadle.rollout_server.engines.images.reader import PlacedImage
from treadle.rollout_server.engines.torch.compute_thread import ComputeThread
from treadle.rollout_server.engines.torch.core import EngineCore
from treadle.rollout_server.engines.torch.model import CachedModel, ModelSource
from treadle.rollout_server.errors import EngineFailed
from treadle.rollout_server.tensors import TensorCheck, check_tensors

_UNSUPPORTED = {
    "model.tensor_model_parallel_size": "use engine vllm or sglang",
    "model.data_parallel_size": "start one server per copy, or use engine vllm or sglang",
    "model.gpu_memory_utilization": "its KV cache grows on demand; lower max_num_seqs",
    "model.kv_cache_bytes": "its KV cache grows on demand; lower max_num_seqs",
    "model.max_num_batched_tokens": "leave it out",
    "model.enable_prefix_caching": "set model.prefix_cache_bytes to 0 instead",
    "engine_args": "leave it out, all settings of this engine are keys of model",
}


class TorchEngine:
    """An `Engine` over a Hugging Face causal LM. Created by `load`, never directly."""

    def __init__(self, thread: ComputeThread, model: CachedModel, core: EngineCore) -> None:
        self.info = EngineInfo(
            name="torch",
            version=package_version("torch"),
            capabilities=EngineCapabilities(
                sampled_logprobs=True,
                priority=True,
                in_flight_continue=True,
                release_memory=True,
                images=model.images is not None,
                collective=True,
                split_tensors=True,
                routed_experts=model.row_bytes > 0,
                prompt_logprobs=True,
                sampling_mask=True,
            ),
            model=model.info,
            parameters=model.parameters,
        )
        self._thread = thread
        self._model = model
        self._core = core
        self._member = CollectiveMember(worker=0, device=model.device)
        self._closed = False

    @classmethod
    async def load(
        cls,
        source: ModelSource,
        *,
        max_num_seqs: int,
        prefix_cache_bytes: int,
        max_draft_tokens: int = 0,
        batch_invariant: bool = False,
        num_threads: int | None = None,
    ) -> "TorchEngine":
        """Loads a model and starts the compute thread.

        Args:
            max_num_seqs: Maximum number of sequences in one step.
            prefix_cache_bytes: Maximum memory for prefixes of sequences that ended.
            max_draft_tokens: Maximum number of tokens that a pass drafts per sequence.
            batch_invariant: Whether the bits of a token's results must not depend on its batch.
            num_threads: CPU threads of a step; None means torch's default.

        Raises:
            ValueError: The model is not supported, or cannot read drafts.
            OSError: The model files are missing.
        """
        thread = ComputeThread("torch-engine")
        try:
            if num_threads is not None:
                await thread.call(partial(torch.set_num_threads, num_threads))
            model = await thread.call(partial(CachedModel, source))
            core = EngineCore(
                model,
                max_num_seqs=max_num_seqs,
                prefix_cache_bytes=prefix_cache_bytes,
                max_draft_tokens=max_draft_tokens,
                batch_invariant=batch_invariant,
                clock=time.monotonic,
            )
            await thread.run_steps(core)
        except BaseException:
            await thread.aclose()
            raise
        return cls(thread, model, core)

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._core.weight_version

    @property
    def counters(self) -> EngineCounters:
        """Numbers of sequences since the start, by outcome."""
        return self._core.counters

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one sequence; see `Engine.generate`."""
        events: asyncio.Queue[EngineEvent | BaseException] = asyncio.Queue()
        new_sequence = partial(self._core.new_sequence, request, events.put_nowait)
        if request.images:
            images = await self._read_images(request)
            # Computing the positions of a long prompt with many images takes milliseconds.
            sequence = await asyncio.to_thread(new_sequence, images)
        else:
            sequence = new_sequence()
        if self._closed:
            yield Started(0)
            yield Finished(FinishReason.INTERRUPTED)
            return
        ended = False
        try:
            await self._thread.call(partial(self._core.submit, sequence))
            while not ended:
                event = await events.get()
                ended = isinstance(event, Finished | BaseException)
                if isinstance(event, BaseException):
                    raise EngineFailed("torch", event) from event
                yield event
        finally:
            if not ended and not self._closed:
                await self._thread.call(partial(self._core.abort, sequence))

    async def _read_images(self, request: EngineRequest) -> tuple[PlacedImage, ...]:
        assert self._model.images is not None, "the capabilities exclude images"
        return await self._model.images.read(request.images, request.prompt)

    async def pause(self, policy: InFlightPolicy) -> None:
        """Pauses sampling; see `Engine.pause`."""
        with self._thread.open_call() as paused:
            await self._thread.call(partial(self._core.pause, policy, partial(_wake, paused)))
            await paused

    async def resume(self) -> None:
        """Resumes sampling; see `Engine.resume`."""
        await self._thread.call(self._core.resume)

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        """Replaces all weights without a staging copy; see `Engine.load_weights`."""
        check = TensorCheck(self.info.parameters)
        staged: list[NamedTensor] = []
        async for tensor in tensors:
            if not tensor.offset:
                check.add(tensor.spec)
            if in_place:
                await self._thread.call(partial(self._model.write, tensor))
            else:
                staged.append(tensor)
        check.finish()
        await self._thread.call(partial(self._core.apply_weights, staged, version))

    async def receive_weights(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec], *, version: int
    ) -> None:
        """Replaces all weights by what a group sends; see `Engine.receive_weights`."""
        check_tensors(self.info.parameters, tensors)
        await self._receive(group, tensors)
        await self._thread.call(partial(self._core.apply_weights, (), version))

    async def _receive(self, group: CollectiveGroup, tensors: Sequence[TensorSpec]) -> None:
        """Writes the tensors that a group broadcasts into the model, bucket by bucket.

        A worker thread waits for a bucket and the compute thread writes it; the next bucket is
        requested once the previous one is written. Nothing waits for a bucket after this ends.
        """
        buckets = self._member.receive_buckets(group, tensors)
        waiting: asyncio.Future[list[Received] | None] | None = None
        try:
            while True:
                waiting = asyncio.ensure_future(asyncio.to_thread(next, buckets, None))
                bucket = await asyncio.shield(waiting)
                if bucket is None:
                    return
                await self._thread.call(partial(_write, self._model, bucket))
        except asyncio.CancelledError:
            self._member.abort("its server gave the update up")
            if waiting is not None and not waiting.done():
                await asyncio.wait({waiting})
                waiting.exception()  # Retrieved, or asyncio would log it; the abort caused it.
            await asyncio.to_thread(buckets.close)
            raise
        except Exception:
            # The group's end tells the senders, who have the update aborted: this is the cause.
            closing = asyncio.ensure_future(asyncio.to_thread(buckets.close))
            while not closing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({closing})
            raise

    async def wait_failed(self) -> Exception:
        """Waits for the compute thread to fail; see `Engine.wait_failed`."""
        try:
            with self._thread.open_call() as broken:
                self._thread.check()
                await broken
        except EngineFailed as error:
            return error
        raise AssertionError("only the end of the thread resolves an open call")

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Releases device memory; see `Engine.release_memory`."""
        await self._thread.call(partial(self._core.release_memory, kinds))

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Restores device memory; see `Engine.restore_memory`."""
        await self._thread.call(partial(self._core.restore_memory, kinds))

    async def aclose(self) -> None:
        """Ends all sequences as INTERRUPTED, then the thread."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(EngineFailed):  # Then every sequence already has the error.
                await self._thread.call(self._core.close)
        if self._model.images is not None:
            self._model.images.close()
        self._member.close()
        await self._thread.aclose()


async def create(config: ServerConfig) -> TorchEngine:
    """Builds the engine of a configuration.

    Raises:
        ValueError: `model.path` is not set, the model is not supported, or a key is set that
            this engine does not support.
        OSError: The model files are missing.
    """
    reject_unsupported(config, "torch", _UNSUPPORTED)
    model = config.model
    if model.path is None:
        raise ValueError("engine 'torch' needs a model: set --model.path DIRECTORY")
    # Progress bars would garble the log.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    source = ModelSource(
        path=model.path,
        dtype=ElementType(model.dtype),
        device=model.device,
        context_length=model.context_length,
        image_cache_bytes=model.image_cache_bytes,
    )
    return await TorchEngine.load(
        source,
        max_num_seqs=model.max_num_seqs,
        prefix_cache_bytes=model.prefix_cache_bytes,
        max_draft_tokens=model.max_draft_tokens,
        batch_invariant=model.batch_invariant,
        num_threads=model.num_threads,
    )


def _write(model: CachedModel, bucket: Sequence[Received]) -> None:
    for spec, tensor in bucket:
        model.overwrite(spec.name, tensor)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
