"""The fake engine: deterministic tokens, real scheduling, no model.

Invariant: the tokens are those of `model.py`, whatever else runs; at most `max_running`
sequences hold a slot, highest priority first and then first come, first served; every sequence
that started ends exactly once, as finished or aborted.

Each sequence runs in the task that reads it, so the engine owns no tasks. A sequence waits for a
slot (woken by one that ends, or by `resume`), for its latency (woken by the clock) or, when kept
by CONTINUE, for `resume`; `pause` waits for the last sequence to end.

An image is identified by its bytes: it is never decoded, and may have any number of placeholders.

Latency is linear: `prefill_s_per_token` per uncached prompt token and `decode_s_per_token` per
sampled token, whatever the number of running sequences.
"""

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    CollectiveGroup,
    EngineCapabilities,
    EngineCounters,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    MemoryKind,
    ModelInfo,
    NamedTensor,
    PromptLogprobs,
    Started,
    TensorSpec,
    Tokens,
)
from treadle.rollout_server.engines.common.arguments import reject_unsupported
from treadle.rollout_server.engines.fake.model import (
    BLOCK_TOKENS,
    Prefix,
    fingerprint_entry,
    fingerprint_of,
    image_digest,
    logits,
    prompt_logprobs,
    routed_experts,
    sample,
    sampling_mask,
)
from treadle.rollout_server.errors import CapabilityMissing
from treadle.rollout_server.model_files import read_model, read_parameters
from treadle.rollout_server.tensors import check_tensors

_CACHE_BLOCKS = 1 << 16
_DEFAULT_CONTEXT = 4096
_SHORT_BYTES = 64 << 10  # Hashed faster than a thread wakes up.


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeLatency:
    """Seconds per token."""

    prefill_s_per_token: float = 0.0
    decode_s_per_token: float = 0.0


class _Sequence:
    """One sequence that holds a slot."""

    def __init__(self) -> None:
        self.interrupted = False
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class FakeEngine:
    """An `Engine` without a model.

    Args:
        model: The model that it claims to have.
        parameters: Tensors that `load_weights` requires; None accepts any.
        latency: Simulated latency; None means none.
        fingerprint: Stands for the weights of version 0; see `model.fingerprint_of`.
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        clock: Clock,
        parameters: tuple[TensorSpec, ...] | None = None,
        latency: FakeLatency | None = None,
        max_running: int = 64,
        fingerprint: bytes = b"",
    ) -> None:
        self.info = EngineInfo(
            name="fake",
            version="1",
            capabilities=EngineCapabilities(
                sampled_logprobs=True,
                priority=True,
                in_flight_continue=True,
                release_memory=True,
                images=True,
                split_tensors=True,
                routed_experts=model.num_moe_layers > 0,
                prompt_logprobs=True,
                sampling_mask=True,
            ),
            model=model,
            parameters=parameters,
        )
        self._clock = clock
        self._latency = latency or FakeLatency()
        self._fingerprint = fingerprint
        self._weight_version = 0
        self._free = max_running
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._running: set[_Sequence] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._policy: InFlightPolicy | None = None
        self._released: frozenset[MemoryKind] = frozenset()
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._closed = False
        self._started = self._finished = self._aborted = 0

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
            running=len(self._running),
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one sequence; see `Engine.generate`."""
        order = next(self._order)
        await self._take_slot(request.priority, order)
        sequence = _Sequence()
        sequence.interrupted = self._closed
        self._running.add(sequence)
        self._idle.clear()
        self._started += 1
        ended = False
        try:
            async with aclosing(self._run(request, sequence, order)) as events:
                async for event in events:
                    ended = isinstance(event, Finished)
                    if ended:
                        self._end(sequence, finished=True)
                    yield event
        finally:
            if not ended:
                self._end(sequence, finished=False)

    async def _run(
        self, request: EngineRequest, sequence: _Sequence, order: int
    ) -> AsyncGenerator[EngineEvent, None]:
        sampling = request.sampling
        vocab_size = self.info.model.vocab_size
        seed = order if sampling.seed is None else sampling.seed
        stops = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stops |= self.info.model.eos_token_ids
        prefix = Prefix()
        digests = [await asyncio.to_thread(image_digest, image.data) for image in request.images]
        cached = self._read_prompt(prefix, request, digests)
        yield Started(cached)
        routes = request.routed_experts_from is not None
        rows = request.prompt[request.routed_experts_from :] if routes else ()
        uncached_s = (len(request.prompt) - cached) * self._latency.prefill_s_per_token
        await self._simulate(sequence, uncached_s)
        if not sequence.interrupted and (scores := self._score(request, digests)):
            yield PromptLogprobs(scores, self._weight_version)
        for _ in range(sampling.max_tokens):
            await self._simulate(sequence, self._latency.decode_s_per_token)
            if sequence.interrupted:
                yield Finished(FinishReason.INTERRUPTED)
                return
            candidates = logits(prefix, self._fingerprint, vocab_size)
            token_id, logprob = sample(
                candidates, sampling, seen=prefix.seen, seed=seed, position=prefix.length
            )
            masks: tuple[bytes, ...] = ()
            if request.sampling_mask:
                seen = prefix.seen
                masks = (
                    sampling_mask(
                        candidates, sampling, seen=seen, drawn=token_id, vocab_size=vocab_size
                    ),
                )
            for block in prefix.extend((token_id,)):
                self._cache_block(block)
            shown = (logprob,) if request.logprobs else ()
            routed = routed_experts(rows, self.info.model)
            yield Tokens((token_id,), shown, self._weight_version, routed, masks)
            rows = (token_id,) if routes else ()
            if token_id in stops:
                yield Finished(FinishReason.STOP)
                return
        yield Finished(FinishReason.LENGTH)

    async def pause(self, policy: InFlightPolicy) -> None:
        """Pauses sampling; see `Engine.pause`."""
        self._policy = policy
        for sequence in self._running:
            sequence.interrupted |= policy is InFlightPolicy.INTERRUPT
            sequence.wake()
        if policy is not InFlightPolicy.CONTINUE:
            await self._idle.wait()

    async def resume(self) -> None:
        """Resumes sampling; see `Engine.resume`."""
        assert not self._released, f"restore {self._released} before resume"
        self._policy = None
        for sequence in self._running:
            sequence.wake()
        self._give_slots()

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        """Replaces the fingerprint; see `Engine.load_weights`. A mixture has a distinct one."""
        assert self._policy is not None, "pause before load_weights"
        assert MemoryKind.WEIGHTS not in self._released, "restore the weights before load_weights"
        specs: list[TensorSpec] = []
        entries: dict[str, tuple[str, str, int]] = {}
        async for tensor in tensors:
            name = tensor.spec.name
            if not tensor.offset:
                specs.append(tensor.spec)
            crc32 = entries[name][2] if tensor.offset else 0
            entries[name] = await _fingerprint_entry(tensor, crc32)
            if in_place:
                before = ("before", self._fingerprint.hex(), 0)
                self._fingerprint = fingerprint_of([before, entries[name]])
        check_tensors(self.info.parameters, specs)
        self._fingerprint = fingerprint_of(entries.values())
        self._weight_version = version
        self._cache.clear()

    async def receive_weights(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec], *, version: int
    ) -> None:
        """Raises CapabilityMissing: there are no tensors to receive into."""
        raise CapabilityMissing(self.info.name, "collective_transport")

    async def wait_failed(self) -> Exception:
        """Waits forever: this engine does not fail."""
        never: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        return await never

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Clears the prefix cache for KV_CACHE; see `Engine.release_memory`."""
        assert self._policy is not None and not self._running, "pause and drain before release"
        self._released |= kinds
        if MemoryKind.KV_CACHE in kinds:
            self._cache.clear()

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Restores memory; see `Engine.restore_memory`."""
        self._released -= kinds

    async def aclose(self) -> None:
        """Ends all sequences as INTERRUPTED, without waiting for them."""
        self._closed = True
        self._policy = None
        for sequence in self._running:
            sequence.interrupted = True
            sequence.wake()
        for _, _, slot in self._waiting:
            if not slot.done():
                self._free -= 1
                slot.set_result(None)
        self._waiting.clear()

    async def _take_slot(self, priority: int, order: int) -> None:
        if self._closed or (self._policy is None and self._free > 0 and not self._waiting):
            self._free -= 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, order, slot))
        try:
            await slot
        except asyncio.CancelledError:
            # It got a slot at the moment of cancellation: pass the slot on.
            if slot.done() and not slot.cancelled():
                self._free += 1
                self._give_slots()
            raise

    def _give_slots(self) -> None:
        while self._policy is None and self._free > 0 and self._waiting:
            slot = heapq.heappop(self._waiting)[2]
            if not slot.done():
                self._free -= 1
                slot.set_result(None)

    def _end(self, sequence: _Sequence, *, finished: bool) -> None:
        self._running.remove(sequence)
        self._finished += finished
        self._aborted += not finished
        self._free += 1
        if not self._running:
            self._idle.set()
        self._give_slots()

    async def _simulate(self, sequence: _Sequence, seconds: float) -> None:
        """Waits for `seconds`, then for as long as CONTINUE keeps the sequence."""
        end = self._clock.time() + seconds
        if seconds == 0:
            await asyncio.sleep(0)
        while not sequence.interrupted and self._clock.time() < end:
            timer = self._clock.call_at(end, sequence.wake)
            try:
                await sequence.wait()
            finally:
                timer.cancel()
        while self._policy is InFlightPolicy.CONTINUE and not sequence.interrupted:
            await sequence.wait()

    def _score(self, request: EngineRequest, image_digests: Sequence[bytes]) -> tuple[float, ...]:
        """Returns the log-probabilities of the prompt that the request wants."""
        if request.prompt_logprobs_from is None:
            return ()
        starts = (image.start for image in request.images)
        return prompt_logprobs(
            request.prompt,
            dict(zip(starts, image_digests, strict=True)),
            self._fingerprint,
            self.info.model.vocab_size,
            first=request.prompt_logprobs_from,
        )

    def _read_prompt(
        self, prefix: Prefix, request: EngineRequest, image_digests: Sequence[bytes]
    ) -> int:
        """Hashes the prompt; returns the number of its cached tokens."""
        cached = 0
        hit = True
        for number, block in enumerate(_blocks(prefix, request, image_digests), start=1):
            hit = hit and block in self._cache
            # The last token is always computed: the first token is sampled from its logits.
            if hit and number * BLOCK_TOKENS < len(request.prompt):
                cached = number * BLOCK_TOKENS
            self._cache_block(block)
        return cached

    def _cache_block(self, block: bytes) -> None:
        self._cache[block] = None
        self._cache.move_to_end(block)
        if len(self._cache) > _CACHE_BLOCKS:
            self._cache.popitem(last=False)


async def _fingerprint_entry(tensor: NamedTensor, crc32: int) -> tuple[str, str, int]:
    if len(tensor.data) <= _SHORT_BYTES:
        return fingerprint_entry(tensor, crc32)
    return await asyncio.to_thread(fingerprint_entry, tensor, crc32)


def _blocks(
    prefix: Prefix, request: EngineRequest, image_digests: Sequence[bytes]
) -> Iterator[bytes]:
    """Hashes a prompt with its images; yields the keys of its cache blocks."""
    done = 0
    for image, digest in zip(request.images, image_digests, strict=True):
        yield from prefix.extend(request.prompt[done : image.start])
        prefix.add_image(digest)
        done = image.start
    yield from prefix.extend(request.prompt[done:])


_UNSUPPORTED = {
    "engine_args": "leave it out, it has none",
    "model.max_draft_tokens": "only the torch engine drafts, leave it out",
    "model.batch_invariant": "only the torch engine has it, leave it out",
}
"""Keys that the engine does not support -> what to do instead."""


async def create(config: ServerConfig) -> FakeEngine:
    """Builds the engine of a configuration; with `model.path` it claims to have that model.

    It stands in for any engine, so it accepts and ignores the keys of `model` about hardware.

    Raises:
        ValueError: A key that it has no counterpart for is set.
    """
    reject_unsupported(config, "fake", _UNSUPPORTED)
    path = config.model.path
    if path is None:
        model = ModelInfo(
            architecture="fake",
            vocab_size=config.fake.vocab_size,
            context_length=config.model.context_length or _DEFAULT_CONTEXT,
            eos_token_ids=frozenset({config.fake.eos_token_id}),
        )
    else:
        model = read_model(path, context_length=config.model.context_length)
    return FakeEngine(
        model=model,
        parameters=None if path is None else read_parameters(path),
        latency=FakeLatency(
            prefill_s_per_token=config.fake.prefill_s_per_token,
            decode_s_per_token=config.fake.decode_s_per_token,
        ),
        max_running=config.model.max_num_seqs,
        fingerprint=config.fake.weights_seed.to_bytes(8, "little"),
        clock=asyncio.get_running_loop(),
    )
