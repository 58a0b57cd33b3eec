"""Conversions between this package's types and protobuf. Pure.

Invariant: None is sent as absent, never as 0, because an explicit temperature of 0 is greedy. An
unknown enum value is refused, not guessed.
"""

from collections.abc import Sequence

from treadle.agent_loop.errors import ContractError, ImageRejectedError
from treadle.agent_loop.generator import RequestContext
from treadle.agent_loop.rpc.handshake import ServerInfo
from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import FinishReason, JsonConstraint, SamplingParams, TagConstraint
from treadle.rollout.v1 import generation_service_pb2 as generation_pb2
from treadle.rollout.v1 import server_service_pb2 as server_pb2

_GRPC_REQUEST_BYTES = 4 << 20  # gRPC's default limit
_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_INTERRUPTED: None,
}


def encode_request(
    prompt: Sequence[int],
    params: SamplingParams,
    request: RequestContext,
    *,
    request_id: str,
    min_weight_version: int,
    images: Sequence[PlacedImage] = (),
    routed_experts_from: int | None = None,
    prompt_logprobs_from: int | None = None,
) -> generation_pb2.GenerateRequest:
    """Returns the message of one Generate call.

    Args:
        prompt: Token ids, at least one of them.
        request: Names the session and the priority.
        min_weight_version: Oldest weights that may sample.
        images: At their placeholders in the prompt.
        routed_experts_from: First row whose experts are wanted; None: none are.
        prompt_logprobs_from: First id of the prompt whose log-probability is wanted; None: none is.
    """
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        session_id=request.session_id,
        prompt_token_ids=prompt,
        sampling=encode_sampling(params),
        logprob_mode=generation_pb2.LOGPROB_MODE_SAMPLED,
        min_weight_version=min_weight_version,
        priority=request.priority,
        images=[
            generation_pb2.PromptImage(
                data=placed.image.data,
                media_type=placed.image.mime,
                first_placeholder=placed.start,
                num_placeholders=placed.num_tokens,
            )
            for placed in images
        ],
        batched=True,
        routed_experts_from=routed_experts_from,
        prompt_logprobs_from=prompt_logprobs_from,
        constraint=_encode_constraint(params.constraint),
        sampling_mask=params.sampling_mask,
    )


def _encode_constraint(
    constraint: JsonConstraint | TagConstraint | None,
) -> generation_pb2.Constraint | None:
    match constraint:
        case None:
            return None
        case JsonConstraint(schema=schema):
            return generation_pb2.Constraint(json_schema=schema)
        case TagConstraint():
            tags = (
                generation_pb2.Tag(begin=tag.begin, json_schema=tag.schema, end=tag.end)
                for tag in constraint.tags
            )
            return generation_pb2.Constraint(
                tagged=generation_pb2.TaggedText(
                    tags=tags,
                    trigger=constraint.trigger,
                    required=constraint.required,
                    single=constraint.single,
                )
            )


def check_size(message: generation_pb2.GenerateRequest, server: ServerInfo) -> None:
    """Checks that a message is not too large for a server; gRPC's own error would hide the cause.

    Raises:
        ImageRejectedError: The message is too large.
    """
    size = message.ByteSize()
    if size > server.max_request_bytes:
        raise ImageRejectedError(
            f"{server.address}: a request with {len(message.images)} images has {size} bytes; the "
            f"server accepts {server.max_request_bytes}: send smaller images, or raise its "
            "max_request_bytes"
        )


def encode_sampling(params: SamplingParams) -> generation_pb2.SamplingParams:
    """Returns the message; fields that are None stay absent."""
    return generation_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def decode_finish(reason: generation_pb2.FinishReason) -> FinishReason | None:
    """Returns why a completion ended; None if it was interrupted and can be resumed.

    Raises:
        ContractError: The reason is unspecified or unknown.
    """
    if reason not in _FINISH_REASONS:
        raise ContractError(f"the server finished with the unknown reason {int(reason)}")
    return _FINISH_REASONS[reason]


def decode_server_info(address: str, info: server_pb2.GetServerInfoResponse) -> ServerInfo:
    """Decodes the answer of GetServerInfo."""
    fields = server_pb2.Capabilities.DESCRIPTOR.fields
    return ServerInfo(
        address=address,
        server_version=info.server_version,
        engine=info.engine,
        engine_version=info.engine_version,
        capabilities=frozenset(f.name for f in fields if getattr(info.capabilities, f.name)),
        architecture=info.model.architecture,
        vocab_size=info.model.vocab_size,
        context_length=info.model.context_length,
        tokenizer_sha256=info.model.tokenizer_sha256,
        weight_version=info.weight_version,
        max_in_flight=info.limits.max_in_flight,
        max_queued=info.limits.max_queued,
        max_request_bytes=info.limits.max_request_bytes or _GRPC_REQUEST_BYTES,
        num_moe_layers=info.model.num_moe_layers,
        num_experts=info.model.num_experts,
        experts_per_token=info.model.experts_per_token,
    )
