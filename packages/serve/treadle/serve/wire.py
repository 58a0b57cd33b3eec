"""The SDK's messages in protobuf, and what is read from them and written into them.

Invariant: field numbers and types are those of the SDK 0.36 to 0.38. The messages are described
here, in a pool of their own, so that neither the SDK nor its release is a dependency and both may
be loaded in one process. Fields that are not read are left out: protobuf skips them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from treadle.serve.errors import ServiceError, refused

__all__ = ["Datum", "Passes", "SampledSequence", "encode_output", "encode_sample", "read_passes"]

_PACKAGE: Final = "treadle.serve.sdk"
# Message -> its fields, as "number name type"; a + before the type: repeated.
_MESSAGES: Final = {
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
    "SampleResponse": "1 sequences +SampledSequence, 2 prompt_logprobs bytes",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape +int64",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape +int64",
    "TensorField": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 fields +TensorField, 3 num_datums int64",
    "Metric": "1 key string, 2 value double",
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string, 2 loss_fn_outputs +ArrayRecord, 3 metrics +Metric"
    ),
    "EncodedTextChunk": "1 tokens bytes",
    "OtherChunk": "1 data bytes",
    "Chunk": "1 encoded_text EncodedTextChunk, 2 image OtherChunk, 3 dmel OtherChunk",
    "TensorInput": "1 key string, 2 value Tensor",
    "Datum": "1 model_input +Chunk, 2 loss_fn_inputs +TensorInput",
    "LossConfigValue": "1 number double, 2 text string",
    "LossConfigEntry": "1 key string, 2 value LossConfigValue",
    "ForwardBackwardRequest": (
        "1 model_id string, 2 seq_id int32, 3 data +Datum, 4 loss_fn string, 5 loss_fn_config "
        "+Metric, 6 forward_only bool, 7 loss_fn_config_v2 +LossConfigEntry"
    ),
}
_FLOAT32, _INT64 = 1, 2
_TYPES: Final[Mapping[int, np.dtype[Any]]] = MappingProxyType(
    {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
)


def _make() -> Mapping[str, type[Any]]:
    """Returns the class of each message. An entry of a map has the bytes of a message."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="treadle/serve/sdk.proto", package=_PACKAGE, syntax="proto3"
    )
    for message, text in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for part in text.split(", "):
            number, name, kind = part.split(" ")
            own = kind.lstrip("+")
            field = described.field.add(name=name, number=int(number))
            field.label = kinds.LABEL_REPEATED if kind != own else kinds.LABEL_OPTIONAL
            if own in _MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{own}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{own.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


MESSAGES: Final = MappingProxyType(_make())


# --- forward and backward passes -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence of N ids, and what a loss needs at each of its positions.

    Attributes:
        inputs: [N] values by the name of the input; `target_tokens` is among them.
    """

    tokens: NDArray[np.int32]
    inputs: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """A request for a forward pass, and a backward pass unless `forward_only`."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool


def read_passes(body: bytes) -> Passes:
    """Reads a `ForwardBackwardRequest`.

    Raises:
        ServiceError: It is none, or has what is not served.
    """
    try:
        message = MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise ServiceError(f"the body is no ForwardBackwardRequest of the SDK: {error}") from None
    settings: dict[str, float | str] = {each.key: each.value for each in message.loss_fn_config}
    for each in message.loss_fn_config_v2:
        settings[each.key] = each.value.text or each.value.number
    return Passes(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_datum(number, each) for number, each in enumerate(message.data)],
        loss=message.loss_fn,
        settings=settings,
        forward_only=message.forward_only,
    )


def _datum(number: int, message: Any) -> Datum:
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            kind = "images" if chunk.HasField("image") else "audio"
            raise refused(f"{kind} in training data (datum {number})", "send chunks of tokens only")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate([np.empty(0, np.int32), *parts])
    inputs = {each.key: _dense(number, each.key, each.value) for each in message.loss_fn_inputs}
    if "target_tokens" not in inputs:
        raise ServiceError(f"datum {number} has no loss_fn_inputs['target_tokens']: add them")
    for name, values in inputs.items():
        if values.ndim != 1:
            raise refused(
                f"{values.ndim} dimensions of {name} (datum {number} has shape "
                f"{list(values.shape)})",
                "give one value per position; several targets of one position are several data",
            )
        if len(values) != len(tokens):
            raise ServiceError(
                f"datum {number} has {len(tokens)} input tokens and {len(values)} of {name}: give "
                "one per input token"
            )
    return Datum(tokens=tokens, inputs=inputs)


def _dense(number: int, name: str, tensor: Any) -> NDArray[Any]:
    if (kind := _TYPES.get(tensor.dtype)) is None:
        raise ServiceError(
            f"datum {number}: {name} has dtype {tensor.dtype}; give float32 or int64"
        )
    try:
        if not tensor.HasField("sparse_csr"):
            values: NDArray[Any] = np.frombuffer(tensor.dense, kind)
            return values.reshape(tuple(tensor.shape) or values.shape)
        shape, csr = tuple(tensor.shape), tensor.sparse_csr
        dense: NDArray[Any] = np.zeros(shape, kind)
        rows = np.frombuffer(csr.crow_indices, "<i8")
        columns = np.frombuffer(csr.col_indices, "<i8")
        dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = np.frombuffer(
            csr.values, kind
        )
    except (ValueError, IndexError) as error:
        raise ServiceError(f"datum {number}: {name} is no tensor of its shape: {error}") from None
    # A column of its own is what a vector becomes in rows and columns.
    return dense[:, 0] if len(shape) == 2 and shape[1] == 1 else dense


def encode_output(
    metrics: Mapping[str, float], fields: Mapping[str, Sequence[NDArray[np.float32]]]
) -> bytes:
    """Returns a `ForwardBackwardOutput`.

    Args:
        fields: [N] of each datum, by name.
    """
    record: Any = MESSAGES["ArrayRecord"](type_tag="ArrayRecord")
    for name, arrays in fields.items():
        record.num_datums = len(arrays)
        tensor = record.fields.add(key=name).value
        tensor.dtype = _FLOAT32
        tensor.data = b"".join(array.astype("<f4").tobytes() for array in arrays)
        ends = np.cumsum([0, *(4 * len(array) for array in arrays)], dtype="<i8")
        tensor.offsets = ends.tobytes()
    message: Any = MESSAGES["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record]
    )
    for name, value in metrics.items():
        message.metrics.add(key=name, value=value)
    encoded: bytes = message.SerializeToString()
    return encoded


# --- samples -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool


def encode_sample(
    sequences: Sequence[SampledSequence], prompt_logprobs: Sequence[float] | None
) -> bytes:
    """Returns a `SampleResponse`.

    Args:
        prompt_logprobs: [P], NaN where there is none; None: they were not asked for.
    """
    message: Any = MESSAGES["SampleResponse"]()
    for each in sequences:
        message.sequences.add(
            stop_reason=0 if each.stopped else 1,
            tokens=np.asarray(each.tokens, "<i4").tobytes(),
            logprobs=np.asarray(each.logprobs, "<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    encoded: bytes = message.SerializeToString()
    return encoded
