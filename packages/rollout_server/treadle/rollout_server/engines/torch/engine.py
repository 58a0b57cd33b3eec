"""The torch engine: a Hugging Face model in the server's process, batched continuously.

Invariant: the event loop never computes. Every method here posts to the compute thread,
which steps an `EngineCore`, and awaits what comes back; see `compute_thread.py` for who
wakes whom.

Who waits: `generate` for the images of its prompt, which threads read and lay out, then for
events, which its own queue holds (at most one completion's worth: the engine does not wait
for a slow reader); `pause` for the running sequences; the rest for at most one step. Closing
a generator returns when the sequence's row is free again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from importlib.metadata import version as package_version

import torch

from treadle.rollout_server.config import ServerConfig
from treadle.rollout_server.engine import (
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
from treadle.rollout_server.engines.torch.compute_thread import ComputeThread
from treadle.rollout_server.engines.torch.core import EngineCore
from treadle.rollout_server.engines.torch.images import PlacedImage
from treadle.rollout_server.engines.torch.model import CachedModel, ModelSource
from treadle.rollout_server.errors import EngineFailed
from treadle.rollout_server.tensors import check_tensors


class TorchEngine:
    """An `Engine` over a Hugging Face causal LM. Made by `load`, never directly."""

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
            ),
            model=model.info,
            parameters=model.parameters,
        )
        self._thread = thread
        self._model = model
        self._core = core
        self._closed = False

    @classmethod
    async def load(
        cls,
        source: ModelSource,
        *,
        max_num_seqs: int,
        prefix_cache_bytes: int,
        num_threads: int | None = None,
    ) -> "TorchEngine":
        """Loads a model and starts to serve it.

        Args:
            source: The model.
            max_num_seqs: Most sequences in one step.
            prefix_cache_bytes: Most memory for the caches of sequences that ended.
            num_threads: CPU threads of a step; None: torch's own choice.

        Raises:
            ValueError: The model is of a kind that is not taken.
            OSError: Its files are not there.
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
                clock=time.monotonic,
            )
            await thread.serve(core)
        except BaseException:
            await thread.aclose()
            raise
        return cls(thread, model, core)

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled from."""
        return self._core.weight_version

    @property
    def counters(self) -> EngineCounters:
        """What became of the sequences so far."""
        return self._core.counters

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one sequence; see `Engine.generate`."""
        events: asyncio.Queue[EngineEvent | BaseException] = asyncio.Queue()
        new_sequence = partial(self._core.new_sequence, request, events.put_nowait)
        if request.images:
            images = await self._read(request)
            # A long prompt with many images takes milliseconds to lay out.
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

    async def _read(self, request: EngineRequest) -> tuple[PlacedImage, ...]:
        assert self._model.images is not None, "capabilities said that it takes none"
        return await self._model.images.read(request.images, request.prompt)

    async def pause(self, policy: InFlightPolicy) -> None:
        """Stops sampling; see `Engine.pause`."""
        with self._thread.open_call() as paused:
            await self._thread.call(partial(self._core.pause, policy, partial(_wake, paused)))
            await paused

    async def resume(self) -> None:
        """Goes on; see `Engine.resume`."""
        await self._thread.call(self._core.resume)

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int) -> None:
        """Replaces all weights; see `Engine.load_weights`.

        Holds a second copy in host memory until the last tensor is there and checked.
        """
        specs: list[TensorSpec] = []
        staged: dict[str, torch.Tensor] = {}
        async for tensor in tensors:
            specs.append(tensor.spec)
            staged[tensor.spec.name] = await self._thread.call(
                partial(self._model.stage, tensor.spec, tensor.data)
            )
        check_tensors(self.info.parameters, specs)
        await self._thread.call(partial(self._core.apply_weights, staged, version))

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Gives device memory away; see `Engine.release_memory`."""
        await self._thread.call(partial(self._core.release_memory, kinds))

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Takes device memory back; see `Engine.restore_memory`."""
        await self._thread.call(partial(self._core.restore_memory, kinds))

    async def aclose(self) -> None:
        """Ends all sequences as INTERRUPTED, then the thread."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(EngineFailed):  # Then every sequence has the error already.
                await self._thread.call(self._core.close)
        if self._model.images is not None:
            self._model.images.close()
        await self._thread.aclose()


async def create(config: ServerConfig) -> TorchEngine:
    """Builds the engine that a configuration asks for.

    Raises:
        ValueError: No model is named, or it is of a kind that is not taken.
        OSError: Its files are not there.
    """
    model = config.model
    if model.path is None:
        raise ValueError("engine 'torch' needs a model: give --model.path DIRECTORY")
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
        num_threads=model.num_threads,
    )


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
