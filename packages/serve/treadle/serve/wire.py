"""What is read from the SDK's messages in protobuf, and what is written into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from treadle.serve.errors import ServiceError, refused
from treadle.tinker.sdk import MESSAGES

__all__ = ["Datum", "Passes", "SampledSequence", "encode_output", "encode_sample", "read_passes"]

_FLOAT32, _INT64 = 1, 2
_TYPES: Final[Mapping[int, np.dtype[Any]]] = MappingProxyType(
    {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
)


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
    named = ((each.key, each.value) for each in message.loss_fn_config_v2)
    settings |= {key: value.text or value.number for key, value in named}
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
    return bytes(message.SerializeToString())


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
        prompt_logprobs: [P], NaN where there is none; None if the request did not want them.
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
    return bytes(message.SerializeToString())
