import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from treadle.rollout.v1 import weight_sync_service_pb2 as _weight_sync_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_LOADING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_PAUSED: _ClassVar[ServerState]
    SERVER_STATE_UPDATING: _ClassVar[ServerState]
    SERVER_STATE_FAILED: _ClassVar[ServerState]
    SERVER_STATE_STOPPING: _ClassVar[ServerState]

class MemoryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_KIND_UNSPECIFIED: _ClassVar[MemoryKind]
    MEMORY_KIND_WEIGHTS: _ClassVar[MemoryKind]
    MEMORY_KIND_KV_CACHE: _ClassVar[MemoryKind]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_LOADING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_PAUSED: ServerState
SERVER_STATE_UPDATING: ServerState
SERVER_STATE_FAILED: ServerState
SERVER_STATE_STOPPING: ServerState
MEMORY_KIND_UNSPECIFIED: MemoryKind
MEMORY_KIND_WEIGHTS: MemoryKind
MEMORY_KIND_KV_CACHE: MemoryKind

class GetServerInfoRequest(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: str
    def __init__(self, client: _Optional[str] = ...) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server_version", "engine", "engine_version", "capabilities", "model", "state", "weight_version", "limits", "num_workers", "load", "time_use")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TIME_USE_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    engine: str
    engine_version: str
    capabilities: Capabilities
    model: ModelInfo
    state: ServerState
    weight_version: int
    limits: AdmissionLimits
    num_workers: int
    load: ServerLoad
    time_use: TimeUse
    def __init__(self, server_version: _Optional[str] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., state: _Optional[_Union[ServerState, str]] = ..., weight_version: _Optional[int] = ..., limits: _Optional[_Union[AdmissionLimits, _Mapping]] = ..., num_workers: _Optional[int] = ..., load: _Optional[_Union[ServerLoad, _Mapping]] = ..., time_use: _Optional[_Union[TimeUse, _Mapping]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("sampled_logprobs", "priority", "in_flight_continue", "inline_transport", "file_transport", "collective_transport", "release_memory", "images", "shared_memory_transport", "in_place_update", "delta_encoding", "routed_experts", "prompt_logprobs", "constrained_sampling", "generate_many", "sampling_mask")
    SAMPLED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_CONTINUE_FIELD_NUMBER: _ClassVar[int]
    INLINE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FILE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_UPDATE_FIELD_NUMBER: _ClassVar[int]
    DELTA_ENCODING_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINED_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GENERATE_MANY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASK_FIELD_NUMBER: _ClassVar[int]
    sampled_logprobs: bool
    priority: bool
    in_flight_continue: bool
    inline_transport: bool
    file_transport: bool
    collective_transport: bool
    release_memory: bool
    images: bool
    shared_memory_transport: bool
    in_place_update: bool
    delta_encoding: bool
    routed_experts: bool
    prompt_logprobs: bool
    constrained_sampling: bool
    generate_many: bool
    sampling_mask: bool
    def __init__(self, sampled_logprobs: bool = ..., priority: bool = ..., in_flight_continue: bool = ..., inline_transport: bool = ..., file_transport: bool = ..., collective_transport: bool = ..., release_memory: bool = ..., images: bool = ..., shared_memory_transport: bool = ..., in_place_update: bool = ..., delta_encoding: bool = ..., routed_experts: bool = ..., prompt_logprobs: bool = ..., constrained_sampling: bool = ..., generate_many: bool = ..., sampling_mask: bool = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("architecture", "vocab_size", "context_length", "tokenizer_sha256", "eos_token_ids", "num_moe_layers", "num_experts", "experts_per_token")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    vocab_size: int
    context_length: int
    tokenizer_sha256: bytes
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_moe_layers: int
    num_experts: int
    experts_per_token: int
    def __init__(self, architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., tokenizer_sha256: _Optional[bytes] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_moe_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., experts_per_token: _Optional[int] = ...) -> None: ...

class AdmissionLimits(_message.Message):
    __slots__ = ("max_in_flight", "max_queued", "max_request_bytes")
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_in_flight: int
    max_queued: int
    max_request_bytes: int
    def __init__(self, max_in_flight: _Optional[int] = ..., max_queued: _Optional[int] = ..., max_request_bytes: _Optional[int] = ...) -> None: ...

class ServerLoad(_message.Message):
    __slots__ = ("running", "queued", "started", "finished", "aborted")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    running: int
    queued: int
    started: int
    finished: int
    aborted: int
    def __init__(self, running: _Optional[int] = ..., queued: _Optional[int] = ..., started: _Optional[int] = ..., finished: _Optional[int] = ..., aborted: _Optional[int] = ...) -> None: ...

class TimeUse(_message.Message):
    __slots__ = ("starting", "prefill", "decode", "waiting", "weights", "memory", "failed")
    STARTING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    starting: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    waiting: _duration_pb2.Duration
    weights: _duration_pb2.Duration
    memory: _duration_pb2.Duration
    failed: _duration_pb2.Duration
    def __init__(self, starting: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., waiting: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., weights: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., memory: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., failed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: _weight_sync_service_pb2.InFlightPolicy
    def __init__(self, in_flight: _Optional[_Union[_weight_sync_service_pb2.InFlightPolicy, str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseMemoryRequest(_message.Message):
    __slots__ = ("kinds",)
    KINDS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[MemoryKind]
    def __init__(self, kinds: _Optional[_Iterable[_Union[MemoryKind, str]]] = ...) -> None: ...

class ReleaseMemoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreMemoryRequest(_message.Message):
    __slots__ = ("kinds",)
    KINDS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[MemoryKind]
    def __init__(self, kinds: _Optional[_Iterable[_Union[MemoryKind, str]]] = ...) -> None: ...

class RestoreMemoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
