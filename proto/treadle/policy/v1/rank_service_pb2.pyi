from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetPolicyInfoRequest(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: str
    def __init__(self, backend: _Optional[str] = ...) -> None: ...

class GetPolicyInfoResponse(_message.Message):
    __slots__ = ("treadle_version", "backend", "backend_version", "python_version", "torch_version", "capabilities")
    TREADLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    treadle_version: str
    backend: str
    backend_version: str
    python_version: str
    torch_version: str
    capabilities: Capabilities
    def __init__(self, treadle_version: _Optional[str] = ..., backend: _Optional[str] = ..., backend_version: _Optional[str] = ..., python_version: _Optional[str] = ..., torch_version: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("reference", "critic", "lora", "offload", "routing_replay", "tensor_parallel", "pipeline_parallel", "context_parallel", "step_settings")
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    CRITIC_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    ROUTING_REPLAY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    STEP_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    reference: bool
    critic: bool
    lora: bool
    offload: bool
    routing_replay: bool
    tensor_parallel: bool
    pipeline_parallel: bool
    context_parallel: bool
    step_settings: bool
    def __init__(self, reference: bool = ..., critic: bool = ..., lora: bool = ..., offload: bool = ..., routing_replay: bool = ..., tensor_parallel: bool = ..., pipeline_parallel: bool = ..., context_parallel: bool = ..., step_settings: bool = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("beat_s",)
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    beat_s: float
    def __init__(self, beat_s: _Optional[float] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("pid", "node", "place")
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    node: str
    place: str
    def __init__(self, pid: _Optional[int] = ..., node: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class OpenRendezvousRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenRendezvousResponse(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class InitializeRequest(_message.Message):
    __slots__ = ("policy", "critic", "model_path", "with_reference", "reference_path", "rank", "world_size", "rendezvous", "local_rank")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CRITIC_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    WITH_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    policy: str
    critic: str
    model_path: str
    with_reference: bool
    reference_path: str
    rank: int
    world_size: int
    rendezvous: str
    local_rank: int
    def __init__(self, policy: _Optional[str] = ..., critic: _Optional[str] = ..., model_path: _Optional[str] = ..., with_reference: bool = ..., reference_path: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., rendezvous: _Optional[str] = ..., local_rank: _Optional[int] = ...) -> None: ...

class InitializeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportOffloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportOffloadResponse(_message.Message):
    __slots__ = ("release_s", "restore_s", "freed_bytes", "host_bytes")
    RELEASE_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    release_s: float
    restore_s: float
    freed_bytes: int
    host_bytes: int
    def __init__(self, release_s: _Optional[float] = ..., restore_s: _Optional[float] = ..., freed_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ...) -> None: ...

class ReportTimeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportTimeResponse(_message.Message):
    __slots__ = ("seconds",)
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: _containers.ScalarMap[str, float]
    def __init__(self, seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
