"""What Tinker's SDK sends: its paths, and its messages in protobuf.

Invariant: field numbers and types are those of the SDK 0.36 to 0.38. The messages are described
here, in a pool of their own, so that neither the SDK nor its release is a dependency and both may
be loaded in one process. Fields that no server here reads are left out: protobuf skips them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["MESSAGES", "PATHS"]

_PACKAGE: Final = "treadle.tinker.sdk"
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


def _make() -> Mapping[str, type[Any]]:
    """Returns the class of each message. An entry of a map has the bytes of a message."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="treadle/tinker/sdk.proto", package=_PACKAGE, syntax="proto3"
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
"""The class of each message, by its name."""

PATHS: Final[Sequence[tuple[str, str]]] = (
    ("GET", "/healthz"),
    ("POST", "/client/config"),
    ("POST", "/client/dynamic_config"),
    ("POST", "/telemetry"),
    ("GET", "/get_server_capabilities"),
    ("POST", "/create_session"),
    ("POST", "/session_heartbeat"),
    ("GET", "/sessions"),
    ("GET", "/sessions/{session}"),
    ("POST", "/sessions/{session}/finish"),
    ("POST", "/create_model"),
    ("POST", "/unload_model"),
    ("POST", "/get_info"),
    ("POST", "/load_weights"),
    ("POST", "/optim_step"),
    ("POST", "/save_weights"),
    ("POST", "/save_weights_for_sampler"),
    ("POST", "/save_weights_external"),
    ("POST", "/create_sampling_session"),
    ("POST", "/asample"),
    ("POST", "/cancel_future"),
    ("POST", "/retrieve_future"),
    ("GET", "/samplers/{sampler}"),
    ("POST", "/weights_info"),
    ("POST", "/copy_weights"),
    ("GET", "/training_runs"),
    ("GET", "/training_runs/{model}"),
    ("GET", "/checkpoints"),
    ("GET", "/training_runs/{model}/checkpoints"),
    ("GET", "/training_runs/{model}/checkpoints/{checkpoint:path}/external_weights_urls"),
    ("POST", "/training_runs/{model}/checkpoints/{checkpoint:path}/publish"),
    ("DELETE", "/training_runs/{model}/checkpoints/{checkpoint:path}/publish"),
    ("PUT", "/training_runs/{model}/checkpoints/{checkpoint:path}/ttl"),
    ("DELETE", "/training_runs/{model}/checkpoints/{checkpoint:path}"),
    ("POST", "/forward_backward"),
    ("POST", "/retrieve_futures"),
    ("POST", "/join_sampling_session"),
    ("POST", "/create_custom_loss"),
    ("POST", "/auth/token"),
    ("GET", "/auth/apikey/me"),
    ("DELETE", "/auth/apikey/me"),
    ("GET", "/audit"),
    ("GET", "/billing/usage/events"),
    ("GET", "/billing/usage/checkpoints/current"),
    ("PUT", "/sessions/{session}/project"),
    ("GET", "/sessions/search"),
    ("GET", "/sessions/{session}/trace_export"),
)
"""Method and path below /api/v1 of every request that the SDK makes."""
