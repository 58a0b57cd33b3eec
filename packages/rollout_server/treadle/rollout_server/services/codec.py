"""The codec: protobuf messages <-> the server's own types.

Invariant: a message that decodes is valid; the error for an invalid one names the field, the
value and what is accepted. An unset optional scalar becomes the default of `engine.Sampling`; a
set one is used as it is, 0 included. The zero of every enum is refused.

The number of values of a repeated field is checked before they are looked at: a message of
`max_request_bytes` holds tens of millions, and Python takes seconds to walk over them.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import (
    Constraint,
    ConstraintForm,
    ElementType,
    EngineCounters,
    EngineInfo,
    EngineRequest,
    InFlightPolicy,
    MemoryKind,
    ModelInfo,
    PromptImage,
    Sampling,
    Tag,
    TaggedText,
    TensorSpec,
)
from treadle.rollout_server.errors import (
    CapabilityMissing,
    ImageUnreadable,
    InvalidField,
    PromptTooLong,
)
from treadle.rollout_server.scheduling.admission import Admission
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.scheduling.time_use import Cause

MAX_ID_BYTES = 128
MAX_TENSORS = 1 << 18
"""Maximum number of tensors of an update, and of parts of a bucket; large models have a third."""
MAX_NAME_BYTES = 1024
"""Maximum length of the name of a tensor or a collective group; the longest have a tenth."""
_MAX_DIMENSIONS = 64
_MAX_KINDS = 16
_MAX_CHOICES = 1 << 16

_IN_FLIGHT: Mapping[int, InFlightPolicy] = {
    sync.IN_FLIGHT_POLICY_DRAIN: InFlightPolicy.DRAIN,
    sync.IN_FLIGHT_POLICY_INTERRUPT: InFlightPolicy.INTERRUPT,
    sync.IN_FLIGHT_POLICY_CONTINUE: InFlightPolicy.CONTINUE,
}
_ELEMENT_TYPES = {
    sync.ELEMENT_TYPE_FLOAT32: ElementType.FLOAT32,
    sync.ELEMENT_TYPE_BFLOAT16: ElementType.BFLOAT16,
    sync.ELEMENT_TYPE_FLOAT16: ElementType.FLOAT16,
    sync.ELEMENT_TYPE_FLOAT8_E4M3FN: ElementType.FLOAT8_E4M3FN,
}
_MEMORY_KINDS: Mapping[int, MemoryKind] = {
    srv.MEMORY_KIND_WEIGHTS: MemoryKind.WEIGHTS,
    srv.MEMORY_KIND_KV_CACHE: MemoryKind.KV_CACHE,
}
_STATES = {
    ServerState.LOADING: srv.SERVER_STATE_LOADING,
    ServerState.SERVING: srv.SERVER_STATE_SERVING,
    ServerState.PAUSED: srv.SERVER_STATE_PAUSED,
    ServerState.UPDATING: srv.SERVER_STATE_UPDATING,
    ServerState.FAILED: srv.SERVER_STATE_FAILED,
    ServerState.STOPPING: srv.SERVER_STATE_STOPPING,
}
# Field -> test of a value, and a description of accepted values.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_tokens": (lambda x: x >= 1, "at least 1"),
    "temperature": (lambda x: 0 <= x < math.inf, "a finite number of at least 0"),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "top_k": (lambda x: x >= 1, "at least 1; unset for the whole vocabulary"),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda x: 0 < x < math.inf, "a finite number above 0"),
}
_SCALARS = (*_RANGES, "seed", "ignore_eos")
# Media type -> first bytes of such a file; WebP's size stands between the two parts.
_IMAGE_BEGINNINGS: Mapping[str, tuple[bytes, bytes]] = {
    "image/png": (b"\x89PNG\r\n\x1a\n", b""),
    "image/jpeg": (b"\xff\xd8\xff", b""),
    "image/webp": (b"RIFF", b"WEBP"),
}


def decode_generate(request: gen.GenerateRequest, info: EngineInfo) -> EngineRequest:
    """Returns a request that every engine can run as it is.

    `max_tokens` is cut to what the context leaves, so that prompt plus completion fits.

    Raises:
        InvalidField: A value is not accepted.
        PromptTooLong: The prompt leaves no room for a token.
        ImageUnreadable: The bytes of an image do not begin like its media type.
        CapabilityMissing: The engine lacks a capability that the request needs.
    """
    check_text("request_id", request.request_id, least=1, at_most=MAX_ID_BYTES)
    check_text("session_id", request.session_id, least=0, at_most=MAX_ID_BYTES)
    prompt_token_ids = request.prompt_token_ids
    num_prompt_tokens = len(prompt_token_ids)
    if num_prompt_tokens >= info.model.context_length:  # Before copying them.
        raise PromptTooLong(num_prompt_tokens, info.model.context_length)
    prompt = tuple(prompt_token_ids[:])  # A slice is copied in C, an iterator calls Python per id.
    _check_tokens("prompt_token_ids", prompt, info.model.vocab_size, least=1)
    logprobs = _decode_logprob_mode(request.logprob_mode)
    if logprobs and not info.capabilities.sampled_logprobs:
        raise CapabilityMissing(info.name, "sampled_logprobs")
    if request.priority and not info.capabilities.priority:
        raise CapabilityMissing(info.name, "priority")
    if request.images and not info.capabilities.images:
        raise CapabilityMissing(info.name, "images")
    routed_experts_from = None
    if request.HasField("routed_experts_from"):
        routed_experts_from = request.routed_experts_from
        if not info.capabilities.routed_experts:
            raise CapabilityMissing(info.name, "routed_experts")
        if routed_experts_from > len(prompt):
            raise InvalidField(
                "routed_experts_from", routed_experts_from, f"at most the prompt's {len(prompt)}"
            )
    prompt_logprobs_from = None
    if request.HasField("prompt_logprobs_from"):
        prompt_logprobs_from = request.prompt_logprobs_from
        if not info.capabilities.prompt_logprobs:
            raise CapabilityMissing(info.name, "prompt_logprobs")
        if not 1 <= prompt_logprobs_from <= len(prompt):
            expected = f"1 to the prompt's {len(prompt)}"
            raise InvalidField("prompt_logprobs_from", prompt_logprobs_from, expected)
    if request.sampling_mask and not info.capabilities.sampling_mask:
        raise CapabilityMissing(info.name, "sampling_mask")
    constraint = _decode_constraint(request, info)
    return EngineRequest(
        request_id=request.request_id,
        session_id=request.session_id,
        prompt=prompt,
        sampling=_decode_sampling(request.sampling, info.model, len(prompt)),
        logprobs=logprobs,
        priority=request.priority,
        images=_decode_images(request.images, len(prompt)),
        routed_experts_from=routed_experts_from,
        prompt_logprobs_from=prompt_logprobs_from,
        constraint=constraint,
        sampling_mask=request.sampling_mask,
    )


def _decode_constraint(request: gen.GenerateRequest, info: EngineInfo) -> Constraint | None:
    if not request.HasField("constraint"):
        return None
    if not info.capabilities.constrained_sampling:
        raise CapabilityMissing(info.name, "constrained_sampling")
    named = request.constraint.WhichOneof("form")
    if named is None:
        raise InvalidField("constraint", "without a form", "one of its forms")
    if named == "tagged":
        tagged = _decode_tagged(request.constraint.tagged)
        return Constraint(form=ConstraintForm.TAGGED, tagged=tagged)
    if named == "choices":
        check_count("constraint.choices", request.constraint.choices.texts, at_most=_MAX_CHOICES)
        texts = tuple(request.constraint.choices.texts)
    else:
        texts = (getattr(request.constraint, named),)
    if not texts or not all(texts):
        raise InvalidField(f"constraint.{named}", list(texts), "texts that are not empty")
    return Constraint(form=ConstraintForm(named), texts=texts)


def _decode_tagged(message: gen.TaggedText) -> TaggedText:
    check_count("constraint.tagged.tags", message.tags, at_most=_MAX_CHOICES)
    tags = tuple(
        Tag(begin=tag.begin, json_schema=tag.json_schema, end=tag.end) for tag in message.tags
    )
    if not tags or not message.trigger:
        raise InvalidField("constraint.tagged", "incomplete", "at least one tag, and a trigger")
    for index, tag in enumerate(tags):
        if not tag.begin.startswith(message.trigger):
            expected = f"a text that begins with the trigger {message.trigger!r}"
            raise InvalidField(f"constraint.tagged.tags[{index}].begin", tag.begin, expected)
        if not tag.json_schema or not tag.end:
            expected = "a schema and an end that are not empty"
            raise InvalidField(f"constraint.tagged.tags[{index}]", "incomplete", expected)
    return TaggedText(
        tags=tags, trigger=message.trigger, required=message.required, single=message.single
    )


def decode_in_flight(value: int, *, field: str = "in_flight") -> InFlightPolicy:
    """Returns the policy, which must be set.

    Raises:
        InvalidField: It is not.
    """
    if value not in _IN_FLIGHT:
        raise InvalidField(field, value, "DRAIN (1), INTERRUPT (2) or CONTINUE (3)")
    return _IN_FLIGHT[value]


def decode_memory_kinds(values: Sequence[int]) -> frozenset[MemoryKind]:
    """Returns the memory kinds, at least one.

    Raises:
        InvalidField: There is none, or one is unknown.
    """
    check_count("kinds", values, at_most=_MAX_KINDS)
    unknown = [value for value in values if value not in _MEMORY_KINDS]
    if unknown or not values:
        raise InvalidField("kinds", list(values), "at least one of WEIGHTS (1), KV_CACHE (2)")
    return frozenset(_MEMORY_KINDS[value] for value in values)


def decode_tensors(specs: Sequence[sync.TensorSpec]) -> tuple[TensorSpec, ...]:
    """Returns the announced tensors, at least one.

    Raises:
        InvalidField: There are none, too many, or one has a wrong field.
    """
    if not specs:
        raise InvalidField("tensors", "empty", "every tensor of the model")
    check_count("tensors", specs, at_most=MAX_TENSORS)
    return tuple(_decode_tensor(index, spec) for index, spec in enumerate(specs))


def decode_update_id(value: str) -> str:
    """Returns the id of an update, which must not be empty."""
    check_text("update_id", value, least=1, at_most=MAX_ID_BYTES)
    return value


def decode_lease(request: sync.BeginUpdateRequest, *, max_s: float) -> float:
    """Returns the lease in seconds.

    Raises:
        InvalidField: It is unset, not above 0, or above `max_s` seconds.
    """
    lease = request.lease
    lease_s = lease.seconds + lease.nanos / 1e9 if request.HasField("lease") else None
    if lease_s is None or not 0 < lease_s <= max_s:
        shown = "unset" if lease_s is None else f"{lease_s} s"
        raise InvalidField("lease", shown, f"above 0 and at most {max_s} s")
    return lease_s


def check_count(field: str, values: Sized, *, at_most: int) -> None:
    """Raises `InvalidField` if a repeated field has more values than are accepted."""
    if len(values) > at_most:
        raise InvalidField(field, f"{len(values)} values", f"at most {at_most}")


def check_text(field: str, value: str, *, least: int, at_most: int) -> None:
    """Raises `InvalidField` if the UTF-8 of a text is shorter or longer than is accepted."""
    size = len(value.encode())
    if not least <= size <= at_most:
        raise InvalidField(field, f"{size} bytes long", f"{least} to {at_most} bytes")


def encode_model(model: ModelInfo) -> srv.ModelInfo:
    """Encodes the model, which clients compare with theirs."""
    return srv.ModelInfo(
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        tokenizer_sha256=model.tokenizer_sha256,
        eos_token_ids=sorted(model.eos_token_ids),
        num_moe_layers=model.num_moe_layers,
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
    )


def encode_load(counters: EngineCounters, admission: Admission) -> srv.ServerLoad:
    """Encodes the load; a call that the engine has not started counts as queued."""
    unstarted = max(0, admission.in_flight - counters.running)
    return srv.ServerLoad(
        running=counters.running,
        queued=admission.queued + unstarted,
        started=counters.started,
        finished=counters.finished,
        aborted=counters.aborted,
    )


def encode_time_use(seconds: Mapping[Cause, float]) -> srv.TimeUse:
    """Encodes what the server's time went to."""
    encoded = srv.TimeUse()
    for cause, value in seconds.items():
        getattr(encoded, cause.value).FromNanoseconds(round(value * 1e9))
    return encoded


def encode_state(state: ServerState) -> srv.ServerState:
    """Encodes the server's state."""
    return _STATES[state]


def _decode_sampling(params: gen.SamplingParams, model: ModelInfo, prompt_tokens: int) -> Sampling:
    values: dict[str, Any] = {}
    for name in _SCALARS:
        if params.HasField(name):
            values[name] = value = getattr(params, name)
            if name in _RANGES and not _RANGES[name][0](value):
                raise InvalidField(f"sampling.{name}", value, _RANGES[name][1])
    if "max_tokens" not in values:
        raise InvalidField("sampling.max_tokens", "unset", "at least 1")
    values["max_tokens"] = min(values["max_tokens"], model.context_length - prompt_tokens)
    check_count("sampling.stop_token_ids", params.stop_token_ids, at_most=model.vocab_size)
    stops = params.stop_token_ids[:]
    _check_tokens("sampling.stop_token_ids", stops, model.vocab_size, least=0)
    return Sampling(**values, stop_token_ids=frozenset(stops))


def _decode_images(
    images: Sequence[gen.PromptImage], prompt_tokens: int
) -> tuple[PromptImage, ...]:
    decoded: list[PromptImage] = []
    free = 0  # First position after the images before.
    for index, image in enumerate(images):
        field = f"images[{index}]"
        if image.media_type not in _IMAGE_BEGINNINGS:
            video = image.media_type.startswith("video/")
            expected = "one of " + ", ".join(_IMAGE_BEGINNINGS)
            raise InvalidField(
                f"{field}.media_type",
                repr(image.media_type),
                f"{expected}: video is not supported, send frames" if video else expected,
            )
        data = image.data  # protobuf copies it on every access
        begin, form = _IMAGE_BEGINNINGS[image.media_type]
        if not data.startswith(begin) or data[8 : 8 + len(form)] != form:
            raise ImageUnreadable(
                index, image.media_type, f"it begins with {data[:12].hex(' ') or 'no byte'}"
            )
        first, count = image.first_placeholder, image.num_placeholders
        if count < 1:
            raise InvalidField(f"{field}.num_placeholders", count, "at least 1")
        if not free <= first <= prompt_tokens - count:
            raise InvalidField(
                f"{field}.first_placeholder",
                first,
                f"from {free} (the end of the image before) to {prompt_tokens - count}, so that "
                f"its {count} ids lie within the prompt's {prompt_tokens}",
            )
        free = first + count
        decoded.append(
            PromptImage(data=data, media_type=image.media_type, start=first, num_tokens=count)
        )
    return tuple(decoded)


def _decode_logprob_mode(mode: int) -> bool:
    if mode not in (gen.LOGPROB_MODE_NONE, gen.LOGPROB_MODE_SAMPLED):
        raise InvalidField("logprob_mode", mode, "NONE (1) or SAMPLED (2)")
    return mode == gen.LOGPROB_MODE_SAMPLED


def _decode_tensor(index: int, spec: sync.TensorSpec) -> TensorSpec:
    check_text(f"tensors[{index}].name", spec.name, least=1, at_most=MAX_NAME_BYTES)
    check_count(f"tensors[{index}].shape", spec.shape, at_most=_MAX_DIMENSIONS)
    if spec.element_type not in _ELEMENT_TYPES:
        expected = ", ".join(f"{t.name} ({n})" for n, t in _ELEMENT_TYPES.items())
        raise InvalidField(f"tensors[{index}].element_type", spec.element_type, expected)
    return TensorSpec(
        name=spec.name,
        element_type=_ELEMENT_TYPES[spec.element_type],
        shape=tuple(spec.shape),
    )


def _check_tokens(field: str, token_ids: Sequence[int], vocab_size: int, *, least: int) -> None:
    if len(token_ids) < least:
        raise InvalidField(field, "empty", "at least one token id")
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidField(
            f"{field}[{index}]", token_ids[index], f"below the vocabulary's {vocab_size}"
        )
