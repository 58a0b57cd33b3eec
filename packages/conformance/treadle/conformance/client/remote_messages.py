"""Converts between the messages of the contract and the types of `Engine`, as a client does.

Invariant: nothing is left to a server's defaults. A field is unset only where the contract gives
that a meaning.
"""

import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf import duration_pb2

from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import (
    CollectiveGroup,
    Constraint,
    ConstraintForm,
    ElementType,
    EngineCapabilities,
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

LEASE = duration_pb2.Duration(seconds=300)

IN_FLIGHT = {
    InFlightPolicy.DRAIN: sync.IN_FLIGHT_POLICY_DRAIN,
    InFlightPolicy.INTERRUPT: sync.IN_FLIGHT_POLICY_INTERRUPT,
    InFlightPolicy.CONTINUE: sync.IN_FLIGHT_POLICY_CONTINUE,
}
ELEMENT_TYPES = {
    ElementType.FLOAT32: sync.ELEMENT_TYPE_FLOAT32,
    ElementType.BFLOAT16: sync.ELEMENT_TYPE_BFLOAT16,
    ElementType.FLOAT16: sync.ELEMENT_TYPE_FLOAT16,
    ElementType.FLOAT8_E4M3FN: sync.ELEMENT_TYPE_FLOAT8_E4M3FN,
}
MEMORY_KINDS = {
    MemoryKind.WEIGHTS: srv.MEMORY_KIND_WEIGHTS,
    MemoryKind.KV_CACHE: srv.MEMORY_KIND_KV_CACHE,
}
_REASONS = {
    gen.FINISH_REASON_STOP: FinishReason.STOP,
    gen.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    gen.FINISH_REASON_INTERRUPTED: FinishReason.INTERRUPTED,
}


def read_info(
    server: srv.GetServerInfoResponse, parameters: tuple[TensorSpec, ...] | None
) -> EngineInfo:
    """Returns GetServerInfo's answer as an `EngineInfo`."""
    can, model = server.capabilities, server.model
    return EngineInfo(
        name=server.engine,
        version=server.engine_version,
        capabilities=EngineCapabilities(
            sampled_logprobs=can.sampled_logprobs,
            priority=can.priority,
            in_flight_continue=can.in_flight_continue,
            release_memory=can.release_memory,
            images=can.images,
            collective=can.collective_transport,
            routed_experts=can.routed_experts,
            prompt_logprobs=can.prompt_logprobs,
            constrained_sampling=can.constrained_sampling,
            sampling_mask=can.sampling_mask,
        ),
        model=ModelInfo(
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=frozenset(model.eos_token_ids),
            tokenizer_sha256=model.tokenizer_sha256,
            num_moe_layers=model.num_moe_layers,
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
        ),
        parameters=parameters,
        num_workers=server.num_workers,
    )


def encode_request(request: EngineRequest, request_id: str) -> gen.GenerateRequest:
    """Returns the message of a request, with every sampling field set."""
    sampling = request.sampling
    return gen.GenerateRequest(
        request_id=request_id,
        session_id=request.session_id,
        prompt_token_ids=request.prompt,
        sampling=gen.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            stop_token_ids=sorted(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
        ),
        logprob_mode=gen.LOGPROB_MODE_SAMPLED if request.logprobs else gen.LOGPROB_MODE_NONE,
        priority=request.priority,
        routed_experts_from=request.routed_experts_from,
        prompt_logprobs_from=request.prompt_logprobs_from,
        constraint=_encode_constraint(request.constraint),
        sampling_mask=request.sampling_mask,
        images=[
            gen.PromptImage(
                data=image.data,
                media_type=image.media_type,
                first_placeholder=image.start,
                num_placeholders=image.num_tokens,
            )
            for image in request.images
        ],
    )


def _encode_constraint(constraint: Constraint | None) -> gen.Constraint | None:
    if constraint is None:
        return None
    if (tagged := constraint.tagged) is not None:
        tags = (
            gen.Tag(begin=tag.begin, json_schema=tag.json_schema, end=tag.end)
            for tag in tagged.tags
        )
        return gen.Constraint(
            tagged=gen.TaggedText(
                tags=tags, trigger=tagged.trigger, required=tagged.required, single=tagged.single
            )
        )
    if constraint.form is ConstraintForm.CHOICES:
        return gen.Constraint(choices=gen.Choices(texts=constraint.texts))
    fields: dict[str, Any] = {constraint.form.value: constraint.texts[0]}
    return gen.Constraint(**fields)


def decode_event(response: gen.GenerateResponse) -> EngineEvent:
    """Returns the event in a message of the stream.

    Raises:
        AssertionError: The event or its finish reason is not in the contract.
    """
    match response.WhichOneof("event"):
        case "started":
            return Started(response.started.cached_prompt_tokens)
        case "prompt_logprobs":
            scores = response.prompt_logprobs
            return PromptLogprobs(tuple(scores.logprobs), scores.weight_version)
        case "tokens":
            chunk = response.tokens
            return Tokens(
                tuple(chunk.token_ids),
                tuple(chunk.logprobs),
                chunk.weight_version,
                chunk.routed_experts,
                tuple(chunk.sampling_masks),
            )
        case "finished":
            reason = response.finished.reason
            assert reason in _REASONS, f"finish reason {reason} is not in the contract"
            return Finished(_REASONS[reason])
        case other:
            raise AssertionError(f"a message with the unexpected event {other!r}")


def begin_request(
    update_id: str, version: int, specs: Sequence[TensorSpec]
) -> sync.BeginUpdateRequest:
    """Returns the request for a staged update over inline transport."""
    return sync.BeginUpdateRequest(
        update_id=update_id,
        weight_version=version,
        tensors=[
            sync.TensorSpec(
                name=spec.name, element_type=ELEMENT_TYPES[spec.element_type], shape=spec.shape
            )
            for spec in specs
        ],
        lease=LEASE,
        inline=sync.InlineTransport(),
    )


def encode_group(group: CollectiveGroup) -> sync.CollectiveTransport:
    """Returns the message of a collective group."""
    return sync.CollectiveTransport(
        backend=group.backend,
        rendezvous=group.rendezvous,
        group_name=group.group_name,
        world_size=group.world_size,
        first_rank=group.first_rank,
        bucket_bytes=group.bucket_bytes,
        senders=group.senders,
    )


async def push_messages(
    update_id: str,
    specs: Sequence[TensorSpec],
    tensors: AsyncIterator[NamedTensor],
    max_chunk_bytes: int,
) -> AsyncIterator[sync.PushWeightsRequest]:
    """Yields the messages of one PushWeights stream."""
    places = {spec.name: index for index, spec in enumerate(specs)}
    yield sync.PushWeightsRequest(header=sync.PushHeader(update_id=update_id))
    async for tensor in tensors:
        for offset in range(0, max(1, len(tensor.data)), max_chunk_bytes):
            data = bytes(tensor.data[offset : offset + max_chunk_bytes])
            chunk = sync.WeightChunk(
                tensor_index=places[tensor.spec.name],
                offset=offset,
                crc32=zlib.crc32(data),
                data=data,
            )
            yield sync.PushWeightsRequest(chunk=chunk)
