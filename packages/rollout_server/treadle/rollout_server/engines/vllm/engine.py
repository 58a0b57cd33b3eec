"""The vLLM engine: `AsyncLLM` behind the `Engine` protocol.

Invariant: vLLM gets a sequence only while the engine is not paused, and after a pause it has
only sequences that sampled at least one token. A sequence that is still queued in vLLM at a
pause is withdrawn and submitted again at `resume`, so neither old weights (by the prefix cache)
nor an old pause affect it.

Each set of weights has a version, and a salt in vLLM's prefix cache that is part of the prompts
submitted under it: blocks with another salt never match. vLLM's core labels sampled tokens with
the version, which changes only while it is paused.

Who waits: `generate` waits for threads that decode and cut the images of its prompt, then for
`resume`, then for events, which `sequence.py` buffers. `pause`
waits for submissions in flight, then for the running sequences, whether or not they are read.
Every call to vLLM also waits for the end of its processes, which raises EngineFailed.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any

from vllm.exceptions import VLLMError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

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
    InFlightPolicy,
    MemoryKind,
    NamedTensor,
    TensorSpec,
)
from treadle.rollout_server.engines.common.checkpoint_parameters import checkpoint_parameters
from treadle.rollout_server.engines.common.collective_group import encode_group
from treadle.rollout_server.engines.common.element_types import TORCH_DTYPES
from treadle.rollout_server.engines.common.runtime_dir import RuntimeDir
from treadle.rollout_server.engines.common.staging import checked_entries, staging
from treadle.rollout_server.engines.constraints import has_tokenizer
from treadle.rollout_server.engines.images.inputs import ImageInput, ImageInputs
from treadle.rollout_server.engines.images.model_types import takes_images
from treadle.rollout_server.engines.vllm import startup
from treadle.rollout_server.engines.vllm.arguments import managed_arguments, reports_experts
from treadle.rollout_server.engines.vllm.calls import Calls
from treadle.rollout_server.engines.vllm.executor import (
    MultiProcessExecutor,
    SingleProcessExecutor,
)
from treadle.rollout_server.engines.vllm.memory import DeviceMemory
from treadle.rollout_server.engines.vllm.sampling import sampling_params, structured_outputs
from treadle.rollout_server.engines.vllm.sequence import InFlightCounter, Sequence, SequenceStats
from treadle.rollout_server.engines.vllm.vision import VisionSetup, image_prompt
from treadle.rollout_server.errors import (
    InvalidField,
    ShuttingDown,
)
from treadle.rollout_server.model_files import read_model
from treadle.rollout_server.tensors import check_tensors

_NAME = "vllm"
_WITHOUT_MASKS = ("distributed_executor_backend", "scheduler_cls")
"""Arguments of the engine with which it reports no sampling masks."""


class VllmEngine:
    """An `Engine` over vLLM. Created by `load`, never directly."""

    def __init__(
        self,
        llm: Any,
        info: EngineInfo,
        runtime_dir: RuntimeDir,
        *,
        on_cpu: bool,
        images: ImageInputs | None = None,
    ) -> None:
        self.info = info
        self._llm = llm
        self._images = images
        self._runtime_dir = runtime_dir
        self._weight_version = 0
        self._salt = itertools.count()
        self._cache_salt = self._new_salt()
        self._serial = itertools.count()
        self._stats = SequenceStats()
        self._submitting = InFlightCounter()
        self._submitted: dict[Sequence, str] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._memory = DeviceMemory(llm, on_cpu=on_cpu)
        # Time for vLLM's processes to release a GPU before they are killed; None for its default.
        self._shutdown_s = 0.0 if on_cpu else None
        self._closed = False
        self._mixed = False  # Whether the weights are a mixture of versions.
        self._call = Calls(_NAME)

    @classmethod
    async def load(cls, config: ServerConfig, library: startup.Library) -> "VllmEngine":
        """Starts vLLM and loads a model.

        Raises:
            ValueError: `model.path` is not set, or vLLM does not support the configuration.
            OSError: The model files are missing.
        """
        model = config.model
        if model.path is None:
            raise ValueError("engine 'vllm' needs a model: set --model.path DIRECTORY")
        held = read_model(model.path, context_length=model.context_length)
        parameters = checkpoint_parameters(model.path, model.dtype)
        images, vision = await asyncio.to_thread(_open_images, config, held.architecture)
        routed_experts = reports_experts(config, held)
        runtime_dir = RuntimeDir()
        try:
            managed = managed_arguments(
                config,
                context_length=held.context_length,
                on_cpu=library.on_cpu,
                routed_experts=routed_experts,
                vision=vision,
            )
            arguments = startup.engine_arguments(
                config,
                managed,
                single_process=SingleProcessExecutor,
                multi_process=MultiProcessExecutor,
            )
            llm = await startup.start(arguments, sockets=runtime_dir.path)
        except BaseException:
            runtime_dir.close()
            raise
        info = EngineInfo(
            name=_NAME,
            version=library.version,
            capabilities=EngineCapabilities(
                sampled_logprobs=True,
                priority=True,
                in_flight_continue=True,
                release_memory=True,
                images=images is not None,
                collective=True,
                prompt_logprobs=True,
                constrained_sampling=has_tokenizer(config),
                routed_experts=routed_experts,
                # Our executor makes vLLM's scheduler forward them.
                sampling_mask=config.engine_args.keys().isdisjoint(_WITHOUT_MASKS),
            ),
            model=held,
            parameters=parameters,
            num_workers=startup.num_workers(llm),
        )
        engine = cls(llm, info, runtime_dir, on_cpu=library.on_cpu, images=images)
        try:
            await engine._prepare()
        except BaseException:
            await engine.aclose()
            raise
        return engine

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._weight_version

    @property
    def counters(self) -> EngineCounters:
        """Numbers of sequences since the start, by outcome."""
        return self._stats.counters

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one sequence; see `Engine.generate`."""
        with _constraint_checked(request):
            parameters = SamplingParams(
                output_kind=RequestOutputKind.DELTA,
                structured_outputs=None
                if request.constraint is None
                else StructuredOutputsParams(**structured_outputs(request.constraint)),
                **sampling_params(request, self.info.model.eos_token_ids),
            )
        images = await self._read_images(request)
        sequence = Sequence(request, self._stats)
        finished = False
        try:
            while not finished:
                try:
                    await self._submit(sequence, images, parameters)
                except ShuttingDown:
                    sequence.interrupt()
                async for event in sequence.events():
                    finished = isinstance(event, Finished)
                    yield event
        finally:
            await self._forget(sequence)

    async def pause(self, policy: InFlightPolicy) -> None:
        """Pauses sampling; see `Engine.pause`."""
        self._open.clear()
        await self._submitting.wait_zero()
        await self._call(self._withdraw())
        # Nothing may be sampled from a mixture, so sequences kept by CONTINUE stay kept.
        if policy is InFlightPolicy.DRAIN and not self._mixed:
            await self._call(self._llm.resume_generation())  # For sequences kept by CONTINUE.
            await self._call(self._stats.running.wait_zero())
        # The current step ends, and its tokens are sent.
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
        if policy is InFlightPolicy.INTERRUPT:
            # The core reports the end of each sequence after all its tokens.
            await self._call(self._llm.pause_generation(mode="abort", clear_cache=False))
            await self._call(self._stats.running.wait_zero())

    async def resume(self) -> None:
        """Resumes sampling; see `Engine.resume`."""
        if self._mixed:
            raise RuntimeError("the weights are a mixture: load all of them before resuming")
        self._memory.check_resident()
        await self._call(self._llm.resume_generation())
        self._open.set()

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        """Replaces all weights; see `Engine.load_weights`.

        If not in place, tensors that are not in files are copied into one. A worker that fails
        leaves layers without memory, so the engine must be restarted.
        """
        if in_place:
            await self._load_in_place(tensors)
        else:
            await self._load_staged(tensors)
        await self._set_version(version)

    async def receive_weights(
        self, group: CollectiveGroup, tensors: Many[TensorSpec], *, version: int
    ) -> None:
        """Replaces all weights by what a group sends; see `Engine.receive_weights`."""
        check_tensors(self.info.parameters, tensors)
        self._mixed = True
        causes = self._workers("treadle_receive", encode_group(group, tensors))
        await self._call.receive(group, causes)
        await self._set_version(version)

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Releases device memory; see `Engine.release_memory`."""
        await self._call(self._memory.release(kinds))

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Restores device memory; see `Engine.restore_memory`."""
        await self._call(self._memory.restore(kinds))

    async def wait_failed(self) -> Exception:
        """Waits for the end of vLLM's processes; see `Engine.wait_failed`."""
        return await self._call.wait_ended()

    async def aclose(self) -> None:
        """Ends all sequences as INTERRUPTED, then vLLM's processes."""
        if self._closed:
            return
        self._closed = True
        if self._images is not None:
            self._images.close()
        self._open.set()
        self._call.end(ShuttingDown())
        for sequence in list(self._submitted):
            sequence.interrupt()
        self._llm.output_handler.cancel()  # Otherwise it would treat the shutdown as a failure.
        await asyncio.to_thread(self._llm.shutdown, self._shutdown_s)
        self._runtime_dir.close()

    async def _prepare(self) -> None:
        self._llm._run_output_handler()  # Otherwise the end of an idle engine is not noticed.
        self._llm.output_handler.add_done_callback(self._on_output_handler_done)
        await self._workers("treadle_install")
        await self._call(self._llm.update_weight_version(str(self._weight_version)))

    async def _read_images(self, request: EngineRequest) -> Many[ImageInput]:
        if not request.images:
            return ()
        assert self._images is not None, "the capabilities exclude images"
        return await self._images.read(request)

    def _prompt(self, sequence: Sequence, images: Many[ImageInput]) -> Any:
        """Returns vLLM's input for a sequence under the present weights."""
        prompt = sequence.request.prompt
        if images:
            return image_prompt(prompt, images, cache_salt=self._cache_salt)
        return tokens_input(list(prompt), cache_salt=self._cache_salt)

    async def _submit(self, sequence: Sequence, images: Many[ImageInput], parameters: Any) -> None:
        """Submits a sequence to vLLM, which puts its outputs into it from then on.

        Raises:
            EngineFailed: vLLM's processes have ended.
            ShuttingDown: This engine is closed.
            InvalidField: vLLM rejects the constraint.
        """
        while not self._open.is_set():  # Another pause may have started meanwhile.
            await self._call(self._open.wait())
        if self._closed:
            raise ShuttingDown
        llm = self._llm
        with _constraint_checked(sequence.request):
            request = llm.input_processor.process_inputs(
                f"{sequence.request.request_id}#{next(self._serial)}",
                self._prompt(sequence, images),
                parameters,
                supported_tasks=("generate",),
                priority=-sequence.request.priority,
            )
        llm.input_processor.assign_request_id(request)
        # As in AsyncLLM.add_request, with the sequence in place of its output collector.
        llm.output_processor.add_request(request, None, None, 0, sequence)
        sequence.submitted(llm.output_processor.request_states[request.request_id])
        self._submitted[sequence] = request.request_id
        self._submitting.increment()
        try:
            await self._call(llm.engine_core.add_request_async(request))
        finally:
            self._submitting.decrement()

    async def _withdraw(self) -> None:
        """Withdraws sequences for which vLLM has not sampled a token."""
        names = [
            name
            for sequence, name in self._submitted.items()
            if not sequence.started and not sequence.ended
        ]
        # Each sequence is notified at once, before vLLM's outputs are read again: one that
        # started in between would count as interrupted. They wait for `resume`.
        await self._llm.abort(names, internal=True)

    async def _forget(self, sequence: Sequence) -> None:
        name = self._submitted.pop(sequence, None)
        if not sequence.ended:
            sequence.abort()
            if name is not None:
                await self._llm.abort(name, internal=True)

    async def _load_staged(self, tensors: AsyncIterator[NamedTensor]) -> None:
        with staging() as staged:
            checked = checked_entries(tensors, self.info.parameters, staged)
            await self._workers("treadle_load", [entry async for entry in checked])

    async def _load_in_place(self, tensors: AsyncIterator[NamedTensor]) -> None:
        with staging() as staged:
            self._mixed = True
            await self._workers("treadle_begin_load")
            try:
                checked = checked_entries(tensors, self.info.parameters, staged, reuse=True)
                async for entry in checked:
                    await self._workers("treadle_write", entry)
            finally:
                await self._workers("treadle_end_load")

    async def _set_version(self, version: int) -> None:
        self._cache_salt = self._new_salt()
        await self._call(self._llm.update_weight_version(str(version)))
        self._weight_version = version
        self._mixed = False

    def _new_salt(self) -> str:
        return f"weights {next(self._salt)}"

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of `WorkerExtension` in every worker; completes even if cancelled.

        Returns:
            The result of each worker.

        Raises:
            EngineFailed: The method failed in a worker.
        """
        # vLLM's own `collective_rpc` returns results of the first data-parallel copy only.
        operation: Coroutine[Any, Any, list[list[Any]]]
        operation = self._llm.engine_core.call_utility_all_async(
            "collective_rpc", method, None, arguments, None
        )
        return [answer for answers in await self._call.whole(operation) for answer in answers]

    def _on_output_handler_done(self, _: asyncio.Task[None]) -> None:
        """Handles the end of vLLM's processes, or unreadable output of theirs."""
        if not self._closed and self._call.end(cause := startup.cause_of_end(self._llm)):
            for sequence in list(self._submitted):
                sequence.fail(cause)


def _open_images(
    config: ServerConfig, architecture: str
) -> tuple[ImageInputs | None, VisionSetup | None]:
    """Returns the reader of images and vLLM's setup, or None of both for a text model."""
    model = config.model
    assert model.path is not None
    if not takes_images(model.path):
        return None, None
    dtype = TORCH_DTYPES[ElementType(model.dtype)]
    images = ImageInputs(model.path, dtype=dtype, cache_bytes=model.image_cache_bytes)
    setup = VisionSetup(architecture, images.max_ids, images.merge_size, images.patch_values)
    return images, setup


@contextmanager
def _constraint_checked(request: EngineRequest) -> Iterator[None]:
    """Turns vLLM's refusal of a request into that of its constraint; all else has been checked."""
    try:
        yield
    except (ValueError, VLLMError) as error:
        if (constraint := request.constraint) is None:
            raise
        expected = f"one that vLLM knows ({error})"
        raise InvalidField("constraint", f"a {constraint.form.value}", expected) from error
