"""The engine ``vllm_stock``: an unmodified vLLM behind the `Engine` protocol.

Invariant: while weights change, vLLM has no sequence. A pause takes all of them back, or waits for
their end, so every token of one submission is of one version. What CONTINUE keeps is the tokens:
at `resume` prompt and tokens are submitted again and read with the new weights, and the draws go
on as if nothing had been (`draws.py`).

Each set of weights has a salt that is part of the prompts submitted under it: in vLLM's prefix
cache blocks with another salt never match.

Who waits: one task per submission reads vLLM's outputs into its `Sequence`, which buffers events;
`generate` waits for these. `pause` waits for these tasks, whether or not events are read. Every
call to vLLM also waits for the end of its processes, which raises EngineFailed.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from collections.abc import Sequence as Many
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    CollectiveGroup,
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
    Tokens,
)
from treadle.rollout_server.engines.common.checkpoint_parameters import checkpoint_parameters
from treadle.rollout_server.engines.common.collective_group import encode_group
from treadle.rollout_server.engines.common.runtime_dir import RuntimeDir
from treadle.rollout_server.engines.common.staging import checked_entries, staging
from treadle.rollout_server.engines.vllm import startup
from treadle.rollout_server.engines.vllm.calls import Calls
from treadle.rollout_server.engines.vllm.memory import DeviceMemory
from treadle.rollout_server.engines.vllm.sampling import sampling_params
from treadle.rollout_server.engines.vllm.sequence import Sequence, SequenceStats
from treadle.rollout_server.engines.vllm_stock.arguments import (
    BACKEND,
    check_model,
    stock_arguments,
)
from treadle.rollout_server.engines.vllm_stock.executor import (
    StockMultiProcessExecutor,
    StockSingleProcessExecutor,
)
from treadle.rollout_server.engines.vllm_stock.versions import NAME
from treadle.rollout_server.errors import EngineFailed, ShuttingDown
from treadle.rollout_server.model_files import read_model
from treadle.rollout_server.tensors import check_tensors

_WATCH_S = 0.5


@dataclass(slots=True)
class _Submission:
    """The labels of one submission's tokens; see `VersionedState`."""

    weight_version_starts: list[tuple[str, int]]
    routed_experts_chunks: list[Any] = field(default_factory=list)


class StockVllmEngine:
    """An `Engine` over vLLM. Created by `load`, never directly."""

    def __init__(
        self, llm: AsyncLLM, info: EngineInfo, runtime_dir: RuntimeDir, *, on_cpu: bool
    ) -> None:
        self.info = info
        self._llm = llm
        self._runtime_dir = runtime_dir
        self._weight_version = 0
        self._salt = itertools.count()
        self._cache_salt = f"weights {next(self._salt)}"
        self._serial = itertools.count()
        self._stats = SequenceStats()
        self._sequences: set[Sequence] = set()
        self._reading: dict[Sequence, tuple[str, asyncio.Task[None]]] = {}
        self._open = self._open_to_started = True
        self._gate = asyncio.Condition()
        self._memory = DeviceMemory(llm, on_cpu=on_cpu)
        # Time for vLLM's processes to release a GPU before they are killed; None for its default.
        self._shutdown_s = 0.0 if on_cpu else None
        self._closed = False
        self._mixed = False  # Whether the weights are a mixture of versions.
        self._call = Calls(NAME)
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def load(cls, config: ServerConfig, library: startup.Library) -> "StockVllmEngine":
        """Starts vLLM and loads a model.

        Raises:
            ValueError: `model.path` is not set, or this engine does not support the model or the
                configuration.
            OSError: The model files are missing.
        """
        model = config.model
        if model.path is None:
            raise ValueError(f"engine {NAME!r} needs a model: set --model.path DIRECTORY")
        held = read_model(model.path, context_length=model.context_length)
        check_model(held.architecture, model.path, on_cpu=library.on_cpu)
        parameters = checkpoint_parameters(model.path, model.dtype)
        if library.on_cpu:  # Otherwise a C++ compiler builds parts of vLLM's sampler.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        managed = stock_arguments(
            config,
            context_length=held.context_length,
            on_cpu=library.on_cpu,
            transfer=WeightTransferConfig(backend=BACKEND),
        )
        runtime_dir = RuntimeDir()
        try:
            arguments = startup.engine_arguments(
                config,
                managed,
                single_process=StockSingleProcessExecutor,
                multi_process=StockMultiProcessExecutor,
            )
            llm = await startup.start(arguments, sockets=runtime_dir.path)
        except BaseException:
            runtime_dir.close()
            raise
        capabilities = EngineCapabilities(
            sampled_logprobs=True,
            priority=True,
            in_flight_continue=True,
            release_memory=True,
            collective=True,
        )
        info = EngineInfo(
            name=NAME,
            version=library.version,
            capabilities=capabilities,
            model=held,
            parameters=parameters,
            num_workers=startup.num_workers(llm),
        )
        return cls(llm, info, runtime_dir, on_cpu=library.on_cpu)

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
        sequence = Sequence(request, self._stats)
        self._sequences.add(sequence)
        sampled: list[int] = []
        finished = False
        try:
            while not finished:
                await self._submit(sequence, sampled)
                async for event in sequence.events():
                    if isinstance(event, Tokens):
                        sampled.extend(event.token_ids)
                    finished = isinstance(event, Finished)
                    yield event
        finally:
            self._sequences.discard(sequence)
            sequence.abort()
            await self._take_back([sequence])

    async def pause(self, policy: InFlightPolicy) -> None:
        """Pauses sampling; see `Engine.pause`."""
        # Nothing may be sampled from a mixture, so sequences kept by CONTINUE stay kept.
        draining = policy is InFlightPolicy.DRAIN and not self._mixed
        if draining:
            await self._call(self._llm.resume_generation())  # For sequences kept by CONTINUE.
        await self._set_gate(False, to_started=draining)
        while draining and (self._reading or self._stats.running.count):
            # A sequence that vLLM has queued may start while others end.
            if self._reading:
                await asyncio.wait([task for _, task in self._reading.values()])
            await self._call(self._stats.running.wait_zero())
        await self._take_back(list(self._reading))
        if policy is InFlightPolicy.INTERRUPT:
            for sequence in list(self._sequences):
                if sequence.started:
                    sequence.interrupt()
            await self._set_gate(False)  # Wakes those that CONTINUE had kept.
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        """Resumes sampling; see `Engine.resume`."""
        if self._mixed:
            raise RuntimeError("the weights are a mixture: load all of them before resuming")
        self._memory.check_resident()
        await self._call(self._llm.resume_generation())
        await self._set_gate(True, to_started=True)

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        """Replaces all weights; see `Engine.load_weights`.

        If not in place, tensors that are not in files are copied into one.
        """
        with staging() as staged:
            entries = checked_entries(tensors, self.info.parameters, staged, reuse=in_place)
            if in_place:
                async with self._mixing():
                    async for entry in entries:
                        await self._update(entries=[entry])
            else:
                whole = [entry async for entry in entries]
                await self._call.whole(self._replace(whole))
        self._set_version(version)

    async def receive_weights(
        self, group: CollectiveGroup, tensors: Many[TensorSpec], *, version: int
    ) -> None:
        """Replaces all weights by what a group sends; see `Engine.receive_weights`."""
        check_tensors(self.info.parameters, tensors)
        await self._call.receive(group, self._receive(encode_group(group, tensors)))
        self._set_version(version)

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
        self._watching.cancel()
        self._call.end(ShuttingDown())
        for sequence in self._sequences:
            sequence.interrupt()
        for _, task in self._reading.values():
            task.cancel()
        await self._set_gate(True, to_started=True)
        await asyncio.to_thread(self._llm.shutdown, self._shutdown_s)
        self._runtime_dir.close()

    async def _set_gate(self, is_open: bool, *, to_started: bool = False) -> None:
        """Opens or closes vLLM for sequences, and for those that have started."""
        async with self._gate:
            self._open, self._open_to_started = is_open, to_started
            self._gate.notify_all()

    def _has_turn(self, sequence: Sequence) -> bool:
        is_open = self._open_to_started if sequence.started else self._open
        return is_open or sequence.ended

    async def _wait_turn(self, sequence: Sequence) -> None:
        async with self._gate:
            await self._gate.wait_for(lambda: self._has_turn(sequence))

    async def _submit(self, sequence: Sequence, sampled: list[int]) -> None:
        """Submits a sequence to vLLM with the ids that it has sampled, unless it has ended.

        Raises:
            EngineFailed: vLLM's processes have ended.
        """
        with suppress(ShuttingDown):
            while not self._has_turn(sequence):  # Another pause may have started meanwhile.
                await self._call(self._wait_turn(sequence))
        if self._closed:
            sequence.interrupt()
        if sequence.ended:
            return
        request = sequence.request
        left = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(sampled))
        rest = replace(request, prompt=(*request.prompt, *sampled), sampling=left)
        name = f"{request.request_id}#{next(self._serial)}"
        sequence.submitted(_Submission([(str(self._weight_version), 0)]))
        self._reading[sequence] = (name, asyncio.create_task(self._read(sequence, rest, name)))

    async def _read(self, sequence: Sequence, request: EngineRequest, name: str) -> None:
        """Puts vLLM's outputs of one submission into its sequence."""
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt), cache_salt=self._cache_salt)
        parameters = SamplingParams(
            output_kind=RequestOutputKind.DELTA,
            **sampling_params(request, self.info.model.eos_token_ids),
        )
        priority = -request.priority
        try:
            outputs = self._llm.generate(prompt, parameters, name, priority=priority)
            async for output in outputs:
                sequence.put(output)
        except Exception as error:
            sequence.fail(EngineFailed(NAME, error))
        finally:
            self._reading.pop(sequence, None)

    async def _take_back(self, sequences: Collection[Sequence]) -> None:
        """Takes sequences back from vLLM; those that have not ended wait to be submitted again."""
        taken = {one: self._reading[one] for one in sequences if one in self._reading}
        if not taken:
            return
        for _, task in taken.values():
            task.cancel()
        await asyncio.wait([task for _, task in taken.values()])
        # vLLM may have one that was cancelled on its way there. One that has ended has none.
        with suppress(EngineFailed, ShuttingDown):
            await self._call(self._llm.abort([name for name, _ in taken.values()]))
        for sequence in taken:
            self._reading.pop(sequence, None)  # A task that had not begun left it there.
            if not sequence.ended:
                sequence.withdraw()

    async def _replace(self, entries: list[Any]) -> None:
        await self._llm.start_weight_update()
        await self._update(entries=entries)
        await self._llm.finish_weight_update()

    async def _receive(self, message: str) -> list[str]:
        async with self._mixing():
            await self._update(group=message)
        return await self._call.whole(self._llm.collective_rpc("treadle_cause"))

    @asynccontextmanager
    async def _mixing(self) -> AsyncIterator[None]:
        """Begins an update, which leaves a mixture until it is complete, and ends it."""
        self._mixed = True
        try:  # Begun also if it is cancelled.
            await self._call.whole(self._llm.start_weight_update())
            yield
        finally:
            await self._call.whole(self._llm.finish_weight_update())

    async def _update(self, **update_info: Any) -> None:
        request = WeightTransferUpdateRequest(update_info=update_info)
        await self._call.whole(self._llm.update_weights(request))

    def _set_version(self, version: int) -> None:
        self._cache_salt = f"weights {next(self._salt)}"
        self._weight_version = version
        self._mixed = False

    async def _watch(self) -> None:
        """Notices the end of vLLM's processes, also while nothing runs."""
        while not self._llm.errored:  # noqa: ASYNC110  (vLLM has no public event for it)
            await asyncio.sleep(_WATCH_S)
        cause = RuntimeError("vLLM's engine core ended; see its log above, and restart the server")
        self._call.end(cause)
        for sequence in list(self._sequences):
            sequence.fail(cause)
