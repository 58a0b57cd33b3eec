from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetWeightSpecsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWeightSpecsResponse(_message.Message):
    __slots__ = ("specs",)
    SPECS_FIELD_NUMBER: _ClassVar[int]
    specs: _containers.RepeatedCompositeFieldContainer[WeightSpec]
    def __init__(self, specs: _Optional[_Iterable[_Union[WeightSpec, _Mapping]]] = ...) -> None: ...

class WeightSpec(_message.Message):
    __slots__ = ("name", "shape", "element_type", "sender")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    element_type: str
    sender: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., element_type: _Optional[str] = ..., sender: _Optional[int] = ...) -> None: ...

class ComputeDeltaRequest(_message.Message):
    __slots__ = ("version", "base_version", "element_type")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    version: int
    base_version: int
    element_type: str
    def __init__(self, version: _Optional[int] = ..., base_version: _Optional[int] = ..., element_type: _Optional[str] = ...) -> None: ...

class ComputeDeltaResponse(_message.Message):
    __slots__ = ("fits", "encoded_bytes", "crc32")
    class EncodedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class Crc32Entry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    FITS_FIELD_NUMBER: _ClassVar[int]
    ENCODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    fits: bool
    encoded_bytes: _containers.ScalarMap[str, int]
    crc32: _containers.ScalarMap[str, int]
    def __init__(self, fits: bool = ..., encoded_bytes: _Optional[_Mapping[str, int]] = ..., crc32: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ServerSecurity(_message.Message):
    __slots__ = ("tls", "roots", "server_name", "token_file")
    TLS_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    SERVER_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FILE_FIELD_NUMBER: _ClassVar[int]
    tls: bool
    roots: str
    server_name: str
    token_file: str
    def __init__(self, tls: bool = ..., roots: _Optional[str] = ..., server_name: _Optional[str] = ..., token_file: _Optional[str] = ...) -> None: ...

class PushTarget(_message.Message):
    __slots__ = ("name", "address", "received_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    received_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., received_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("update_id", "element_type", "targets", "chunk_bytes", "deadline_s", "delta", "security")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SECURITY_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    element_type: str
    targets: _containers.RepeatedCompositeFieldContainer[PushTarget]
    chunk_bytes: int
    deadline_s: float
    delta: bool
    security: ServerSecurity
    def __init__(self, update_id: _Optional[str] = ..., element_type: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[PushTarget, _Mapping]]] = ..., chunk_bytes: _Optional[int] = ..., deadline_s: _Optional[float] = ..., delta: bool = ..., security: _Optional[_Union[ServerSecurity, _Mapping]] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("num_bytes", "errors")
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    errors: _containers.ScalarMap[str, str]
    def __init__(self, num_bytes: _Optional[int] = ..., errors: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WriteFilesRequest(_message.Message):
    __slots__ = ("directory", "element_type", "version", "base_version")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    directory: str
    element_type: str
    version: int
    base_version: int
    def __init__(self, directory: _Optional[str] = ..., element_type: _Optional[str] = ..., version: _Optional[int] = ..., base_version: _Optional[int] = ...) -> None: ...

class WriteFilesResponse(_message.Message):
    __slots__ = ("num_bytes", "crc32")
    class Crc32Entry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    crc32: _containers.ScalarMap[str, int]
    def __init__(self, num_bytes: _Optional[int] = ..., crc32: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SharedMemoryTarget(_message.Message):
    __slots__ = ("name", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class PushSharedMemoryRequest(_message.Message):
    __slots__ = ("update_id", "element_type", "targets", "bucket_bytes", "deadline_s", "split_tensors", "security")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SPLIT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    SECURITY_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    element_type: str
    targets: _containers.RepeatedCompositeFieldContainer[SharedMemoryTarget]
    bucket_bytes: int
    deadline_s: float
    split_tensors: bool
    security: ServerSecurity
    def __init__(self, update_id: _Optional[str] = ..., element_type: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[SharedMemoryTarget, _Mapping]]] = ..., bucket_bytes: _Optional[int] = ..., deadline_s: _Optional[float] = ..., split_tensors: bool = ..., security: _Optional[_Union[ServerSecurity, _Mapping]] = ...) -> None: ...

class PushSharedMemoryResponse(_message.Message):
    __slots__ = ("num_bytes", "errors", "incompatible")
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    INCOMPATIBLE_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    errors: _containers.ScalarMap[str, str]
    incompatible: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_bytes: _Optional[int] = ..., errors: _Optional[_Mapping[str, str]] = ..., incompatible: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenGroupRequest(_message.Message):
    __slots__ = ("rank", "group_name", "timeout_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    group_name: str
    timeout_s: float
    def __init__(self, rank: _Optional[int] = ..., group_name: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class OpenGroupResponse(_message.Message):
    __slots__ = ("rendezvous",)
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    rendezvous: str
    def __init__(self, rendezvous: _Optional[str] = ...) -> None: ...

class BroadcastRequest(_message.Message):
    __slots__ = ("group_name", "backend", "rendezvous", "world_size", "bucket_bytes", "element_type", "timeout_s")
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    group_name: str
    backend: str
    rendezvous: str
    world_size: int
    bucket_bytes: int
    element_type: str
    timeout_s: float
    def __init__(self, group_name: _Optional[str] = ..., backend: _Optional[str] = ..., rendezvous: _Optional[str] = ..., world_size: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., element_type: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class BroadcastResponse(_message.Message):
    __slots__ = ("num_bytes", "error", "lost")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    error: str
    lost: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_bytes: _Optional[int] = ..., error: _Optional[str] = ..., lost: _Optional[_Iterable[int]] = ...) -> None: ...
