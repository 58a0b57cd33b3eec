"""Servers with one fault each, which the conformance kit must find.

Each is the fake engine, or the server around it, with the single fault that its name states. Their
model has two tensors, a matrix and a vector. Start one with ``--engine
engines.faulty_servers:<name>``, each in a separate process because some of them patch modules of
the server.
"""

import asyncio
import math
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    CollectiveGroup,
    ElementType,
    EngineCounters,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    ModelInfo,
    NamedTensor,
    PromptLogprobs,
    Sampling,
    Started,
    TensorSpec,
    Tokens,
)
from treadle.rollout_server.engines.fake import engine as fake
from treadle.rollout_server.engines.fake import model as fake_model
from treadle.rollout_server.engines.fake.engine import FakeEngine, FakeLatency
from treadle.rollout_server.errors import CollectiveBroken, InvalidField, StateConflict
from treadle.rollout_server.scheduling.engine_controller import EngineController
from treadle.rollout_server.services import generation
from treadle.rollout_server.services.codec import decode_generate
from treadle.rollout_server.updates import buckets, files, weight_updater
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.buckets import BucketPart, MappedSegment
from treadle.rollout_server.updates.delta import DeltaBase, DeltaEncoding, as_base
from treadle.rollout_server.updates.incoming import IncomingTensors
from treadle.rollout_server.updates.staging import Assembler
from treadle.rollout_server.updates.weight_update import CurrentUpdate, WeightUpdate
from treadle.rollout_server.updates.weight_updater import WeightUpdater

MODEL = ModelInfo(
    architecture="fake",
    vocab_size=64,
    context_length=512,
    eos_token_ids=frozenset({0, 1}),
    num_moe_layers=2,
    num_experts=300,
    experts_per_token=2,
)
PARAMETERS = tuple(
    TensorSpec(name=name, element_type=ElementType.FLOAT32, shape=shape)
    for name, shape in (("matrix", (64, 8)), ("vector", (8,)))
)
MAX_RUNNING = 8
_READING: set[asyncio.Task[None]] = set()
Factory = Callable[[ServerConfig], Awaitable[FakeEngine]]


class _WrongFinishReason(FakeEngine):
    """Reports LENGTH when a stop id ended the completion."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                stopped = isinstance(event, Finished) and event.reason is FinishReason.STOP
                yield Finished(FinishReason.LENGTH) if stopped else event


class _NewRowsOnly(FakeEngine):
    """Reports no experts of rows whose keys and values it had cached."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        missing = 0
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    missing = event.cached_prompt_tokens * self.info.model.routed_row_bytes
                elif isinstance(event, Tokens):
                    event = replace(event, routed_experts=event.routed_experts[missing:])
                    missing = 0
                yield event


class _NewLogprobsOnly(FakeEngine):
    """Reports no log-probabilities of ids of the prompt whose keys and values it had cached."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        missing = 0
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    missing = max(event.cached_prompt_tokens - 5, 0)
                elif isinstance(event, PromptLogprobs):
                    event = replace(event, logprobs=event.logprobs[missing:])
                yield event


class _TokensAlone(FakeEngine):
    """Reports sampling masks that keep nothing but the token itself."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    event = replace(event, sampling_masks=(b"",) * len(event.sampling_masks))
                yield event


class _StaleLabels(FakeEngine):
    """Labels every token of a sequence with the version of its first token."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        first: int | None = None
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    first = event.weight_version if first is None else first
                    event = replace(event, weight_version=first)
                yield event


class _SwallowedCancellation(FakeEngine):
    """Runs a cancelled sequence to its end."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        arrived: asyncio.Queue[EngineEvent] = asyncio.Queue()
        events = super().generate(request)

        async def read() -> None:
            async for event in events:
                arrived.put_nowait(event)

        reading = asyncio.create_task(read())
        _READING.add(reading)
        reading.add_done_callback(_READING.discard)
        event: EngineEvent | None = None
        while not isinstance(event, Finished):
            event = await arrived.get()
            yield event


class _UnseededDraws(FakeEngine):
    """Ignores the seed."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        request = replace(request, sampling=replace(request.sampling, seed=None))
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                yield event


class _OldWeights(FakeEngine):
    """Accepts new weights but samples from the old ones."""

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        old = self._fingerprint
        await super().load_weights(tensors, version=version, in_place=in_place)
        self._fingerprint = old


class _LostAborts(FakeEngine):
    """Does not count aborted sequences."""

    @property
    def counters(self) -> EngineCounters:
        return replace(super().counters, aborted=0)


class _BreaksAtPauses(FakeEngine):
    """Fails when it is told to pause."""

    async def pause(self, policy: InFlightPolicy) -> None:
        raise RuntimeError(f"cannot {policy.value}")


class _Grouped(FakeEngine):
    """Joins collective groups, as its only worker."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        capabilities = replace(self.info.capabilities, collective=True)
        self.info = replace(self.info, capabilities=capabilities)
        self._member: Any = None

    async def receive_weights(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec], *, version: int
    ) -> None:
        import torch  # Late: the other servers start without torch.

        from treadle.rollout_server.engines.common.collective import CollectiveMember

        if self._member is None:
            self._member = CollectiveMember(worker=0, device=torch.device("cpu"))

        def receive() -> list[NamedTensor]:
            with closing(self._member.receive(group, tensors)) as received:
                return [_named(spec, tensor) for spec, tensor in received]

        async def stream(found: list[NamedTensor]) -> AsyncIterator[NamedTensor]:
            for tensor in found:
                yield tensor

        try:
            found = await asyncio.to_thread(receive)
        except asyncio.CancelledError:
            self._member.abort("the update was cancelled")
            raise
        await self.load_weights(stream(found), version=version, in_place=True)


class _OldWeightsOfGroups(_Grouped, _OldWeights):
    """Takes part in a group's updates but samples from the old weights."""


class _GroupsThatNeverBreak(_Grouped):
    """Accepts an update from a broken group."""

    async def receive_weights(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec], *, version: int
    ) -> None:
        try:
            await super().receive_weights(group, tensors, version=version)
        except CollectiveBroken:
            self._weight_version = version


def _named(spec: TensorSpec, tensor: Any) -> NamedTensor:
    data = bytearray(tensor.contiguous().view(-1).numpy().tobytes())
    return NamedTensor(spec=spec, data=memoryview(data))


def _sample_untempered(
    candidates: dict[int, float], sampling: Sampling, *, seen: set[int], seed: int, position: int
) -> tuple[int, float]:
    """Draws correctly but reports the log-prob at temperature 1."""
    token_id, logprob = fake_model.sample(
        candidates, sampling, seen=seen, seed=seed, position=position
    )
    if sampling.temperature == 0:
        return token_id, logprob
    total = sum(math.exp(score) for score in candidates.values())
    return token_id, candidates[token_id] - math.log(total)


def _accept_unchecked(
    self: Assembler, tensor_index: int, offset: int, crc32: int, data: bytes | memoryview
) -> bool:
    """Accepts a chunk with any checksum."""
    return _ACCEPT(self, tensor_index, offset, zlib.crc32(data), data)


_ACCEPT = Assembler.accept


def _never_different(self: DeltaBase, index: int, crc32: int) -> str | None:
    """Accepts the result of a delta with any checksum."""
    return None


def _as_any_base(
    kept: Sequence[TensorSpec], base: DeltaBase | None, delta: DeltaEncoding
) -> DeltaBase:
    """Uses the base that is held, whichever was requested."""
    wanted = delta.base_version if base is None else base.version
    return _AS_BASE(kept, base, replace(delta, base_version=wanted))


def _decode_known(request: gen.GenerateRequest, info: EngineInfo) -> EngineRequest:
    """Rejects fields that a later release of the contract may add."""
    if len(UnknownFieldSet(request)):
        raise InvalidField("request", "unknown fields", "none")
    return _DECODE(request, info)


async def _leave_whole(self: EngineController, *, mixed: bool) -> None:
    """Resumes after every update in place, even with mixed weights."""
    await _LEAVE(self, mixed=False)


class _AnyChecksum(int):
    """A checksum that equals every other."""

    def __ne__(self, other: object) -> bool:
        return False


async def _take_late(
    self: IncomingTensors, segment: MappedSegment, parts: Sequence[BucketPart]
) -> None:
    """Gives slots back at once and reads them only when the stream ends; staged only."""
    late = _LATE.setdefault(self, [])
    late.extend(parts)
    if not parts or self.queue is not None:
        await _TAKE(self, segment, _LATE.pop(self))


def _begun_live(self: CurrentUpdate, begin: Begin) -> WeightUpdate | None:
    """Returns the live update and forgets earlier ones."""
    live = self.live
    return live if live is not None and live.update_id == begin.update_id else None


async def _abort_anything(self: WeightUpdater, update_id: str) -> None:
    """Reports success even where the update cannot be aborted."""
    with suppress(StateConflict):
        await _ABORT(self, update_id)


_ABORT = WeightUpdater.abort
_AS_BASE = as_base
_TAKE = IncomingTensors.take_bucket
_DECODE = decode_generate
_LEAVE = EngineController.leave_update
_LATE: dict[IncomingTensors, list[BucketPart]] = {}


def _factory(kind: type[FakeEngine]) -> Factory:
    async def create(config: ServerConfig) -> FakeEngine:
        return kind(
            model=MODEL,
            parameters=PARAMETERS,
            clock=asyncio.get_running_loop(),
            latency=FakeLatency(decode_s_per_token=0.001),
            max_running=MAX_RUNNING,
        )

    return create


async def wrong_logprobs(config: ServerConfig) -> FakeEngine:
    """Reports log-probs of a distribution other than the one it draws from."""
    fake.sample = _sample_untempered  # type: ignore[attr-defined]
    return await honest(config)


async def unchecked_chunks(config: ServerConfig) -> FakeEngine:
    """Accepts chunks that do not match their checksum."""
    Assembler.accept = _accept_unchecked  # type: ignore[method-assign]
    return await honest(config)


async def unchecked_deltas(config: ServerConfig) -> FakeEngine:
    """Accepts deltas that lead to other weights than announced."""
    DeltaBase._difference = _never_different  # type: ignore[method-assign]
    return await honest(config)


async def any_base(config: ServerConfig) -> FakeEngine:
    """Applies deltas to whichever base is held."""
    weight_updater.as_base = _as_any_base  # type: ignore[attr-defined]
    return await honest(config)


async def early_slots(config: ServerConfig) -> FakeEngine:
    """Gives slots of shared memory back before it has read them."""
    IncomingTensors.take_bucket = _take_late  # type: ignore[method-assign]
    return await honest(config)


async def any_segment(config: ServerConfig) -> FakeEngine:
    """Reads memory that may shrink, or that belongs to another update."""
    buckets._check = lambda fd, num_bytes, update_id: None
    return await honest(config)


async def unrenewed_leases(config: ServerConfig) -> FakeEngine:
    """Lets a lease expire although the trainer still calls."""
    WeightUpdate.renew = lambda self, now: None  # type: ignore[method-assign]
    return await honest(config)


async def forgotten_commits(config: ServerConfig) -> FakeEngine:
    """Takes a BeginUpdate that is repeated after the commit for a new update."""
    CurrentUpdate.begun = _begun_live  # type: ignore[method-assign]
    return await honest(config)


async def aborted_commits(config: ServerConfig) -> FakeEngine:
    """Reports that it aborted an update that it has committed."""
    WeightUpdater.abort = _abort_anything  # type: ignore[method-assign]
    return await honest(config)


async def served_mixtures(config: ServerConfig) -> FakeEngine:
    """Serves after an update in place that was not committed."""
    EngineController.leave_update = _leave_whole  # type: ignore[method-assign]
    return await honest(config)


async def unchecked_files(config: ServerConfig) -> FakeEngine:
    """Accepts files with any checksum."""
    vars(files)["zlib"] = SimpleNamespace(crc32=lambda *_: _AnyChecksum())
    return await honest(config)


async def no_unknown_fields(config: ServerConfig) -> FakeEngine:
    """Rejects requests from clients of a later release."""
    generation.decode_generate = _decode_known  # type: ignore[attr-defined]
    return await honest(config)


honest = _factory(FakeEngine)
breaks_at_pauses = _factory(_BreaksAtPauses)
lost_aborts = _factory(_LostAborts)
wrong_finish_reason = _factory(_WrongFinishReason)
new_logprobs_only = _factory(_NewLogprobsOnly)
new_rows_only = _factory(_NewRowsOnly)
stale_labels = _factory(_StaleLabels)
swallowed_cancellation = _factory(_SwallowedCancellation)
tokens_alone = _factory(_TokensAlone)
unseeded_draws = _factory(_UnseededDraws)
old_weights = _factory(_OldWeights)
honest_group = _factory(_Grouped)
old_weights_of_groups = _factory(_OldWeightsOfGroups)
groups_that_never_break = _factory(_GroupsThatNeverBreak)
