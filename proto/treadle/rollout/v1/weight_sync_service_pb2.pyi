import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ElementType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ELEMENT_TYPE_UNSPECIFIED: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT32: _ClassVar[ElementType]
    ELEMENT_TYPE_BFLOAT16: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT16: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT8_E4M3FN: _ClassVar[ElementType]

class InFlightPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_FLIGHT_POLICY_UNSPECIFIED: _ClassVar[InFlightPolicy]
    IN_FLIGHT_POLICY_DRAIN: _ClassVar[InFlightPolicy]
    IN_FLIGHT_POLICY_INTERRUPT: _ClassVar[InFlightPolicy]
    IN_FLIGHT_POLICY_CONTINUE: _ClassVar[InFlightPolicy]
ELEMENT_TYPE_UNSPECIFIED: ElementType
ELEMENT_TYPE_FLOAT32: ElementType
ELEMENT_TYPE_BFLOAT16: ElementType
ELEMENT_TYPE_FLOAT16: ElementType
ELEMENT_TYPE_FLOAT8_E4M3FN: ElementType
IN_FLIGHT_POLICY_UNSPECIFIED: InFlightPolicy
IN_FLIGHT_POLICY_DRAIN: InFlightPolicy
IN_FLIGHT_POLICY_INTERRUPT: InFlightPolicy
IN_FLIGHT_POLICY_CONTINUE: InFlightPolicy

class BeginUpdateRequest(_message.Message):
    __slots__ = ("update_id", "weight_version", "tensors", "lease", "inline", "file", "collective")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    weight_version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    lease: _duration_pb2.Duration
    inline: InlineTransport
    file: FileTransport
    collective: CollectiveTransport
    def __init__(self, update_id: _Optional[str] = ..., weight_version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., inline: _Optional[_Union[InlineTransport, _Mapping]] = ..., file: _Optional[_Union[FileTransport, _Mapping]] = ..., collective: _Optional[_Union[CollectiveTransport, _Mapping]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "element_type", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    element_type: ElementType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., element_type: _Optional[_Union[ElementType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class InlineTransport(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FileTransport(_message.Message):
    __slots__ = ("directory", "crc32")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    directory: str
    crc32: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, directory: _Optional[str] = ..., crc32: _Optional[_Iterable[int]] = ...) -> None: ...

class CollectiveTransport(_message.Message):
    __slots__ = ("backend", "rendezvous", "group_name", "world_size", "first_rank")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    backend: str
    rendezvous: str
    group_name: str
    world_size: int
    first_rank: int
    def __init__(self, backend: _Optional[str] = ..., rendezvous: _Optional[str] = ..., group_name: _Optional[str] = ..., world_size: _Optional[int] = ..., first_rank: _Optional[int] = ...) -> None: ...

class BeginUpdateResponse(_message.Message):
    __slots__ = ("received_bytes", "max_chunk_bytes")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: _containers.RepeatedScalarFieldContainer[int]
    max_chunk_bytes: int
    def __init__(self, received_bytes: _Optional[_Iterable[int]] = ..., max_chunk_bytes: _Optional[int] = ...) -> None: ...

class PushWeightsRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    chunk: WeightChunk
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., chunk: _Optional[_Union[WeightChunk, _Mapping]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("update_id",)
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    def __init__(self, update_id: _Optional[str] = ...) -> None: ...

class WeightChunk(_message.Message):
    __slots__ = ("tensor_index", "offset", "crc32", "data")
    TENSOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    tensor_index: int
    offset: int
    crc32: int
    data: bytes
    def __init__(self, tensor_index: _Optional[int] = ..., offset: _Optional[int] = ..., crc32: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushWeightsResponse(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...

class GetUpdateRequest(_message.Message):
    __slots__ = ("update_id",)
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    def __init__(self, update_id: _Optional[str] = ...) -> None: ...

class GetUpdateResponse(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, received_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitUpdateRequest(_message.Message):
    __slots__ = ("update_id", "in_flight")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    in_flight: InFlightPolicy
    def __init__(self, update_id: _Optional[str] = ..., in_flight: _Optional[_Union[InFlightPolicy, str]] = ...) -> None: ...

class CommitUpdateResponse(_message.Message):
    __slots__ = ("weight_version",)
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    weight_version: int
    def __init__(self, weight_version: _Optional[int] = ...) -> None: ...

class AbortUpdateRequest(_message.Message):
    __slots__ = ("update_id",)
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    def __init__(self, update_id: _Optional[str] = ...) -> None: ...

class AbortUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
