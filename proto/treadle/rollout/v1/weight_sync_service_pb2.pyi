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
    __slots__ = ("update_id", "weight_version", "tensors", "lease", "inline", "file", "collective", "shared_memory", "in_place", "delta", "keep_base")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    KEEP_BASE_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    weight_version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    lease: _duration_pb2.Duration
    inline: InlineTransport
    file: FileTransport
    collective: CollectiveTransport
    shared_memory: SharedMemoryTransport
    in_place: InPlace
    delta: DeltaEncoding
    keep_base: bool
    def __init__(self, update_id: _Optional[str] = ..., weight_version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., inline: _Optional[_Union[InlineTransport, _Mapping]] = ..., file: _Optional[_Union[FileTransport, _Mapping]] = ..., collective: _Optional[_Union[CollectiveTransport, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemoryTransport, _Mapping]] = ..., in_place: _Optional[_Union[InPlace, _Mapping]] = ..., delta: _Optional[_Union[DeltaEncoding, _Mapping]] = ..., keep_base: bool = ...) -> None: ...

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
    __slots__ = ("backend", "rendezvous", "group_name", "world_size", "first_rank", "bucket_bytes", "senders")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    backend: str
    rendezvous: str
    group_name: str
    world_size: int
    first_rank: int
    bucket_bytes: int
    senders: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, backend: _Optional[str] = ..., rendezvous: _Optional[str] = ..., group_name: _Optional[str] = ..., world_size: _Optional[int] = ..., first_rank: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., senders: _Optional[_Iterable[int]] = ...) -> None: ...

class SharedMemoryTransport(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InPlace(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: InFlightPolicy
    def __init__(self, in_flight: _Optional[_Union[InFlightPolicy, str]] = ...) -> None: ...

class DeltaEncoding(_message.Message):
    __slots__ = ("base_weight_version", "encoded_bytes", "crc32")
    BASE_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENCODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    base_weight_version: int
    encoded_bytes: _containers.RepeatedScalarFieldContainer[int]
    crc32: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, base_weight_version: _Optional[int] = ..., encoded_bytes: _Optional[_Iterable[int]] = ..., crc32: _Optional[_Iterable[int]] = ...) -> None: ...

class BeginUpdateResponse(_message.Message):
    __slots__ = ("received_bytes", "max_chunk_bytes", "split_tensors")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPLIT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    received_bytes: _containers.RepeatedScalarFieldContainer[int]
    max_chunk_bytes: int
    split_tensors: bool
    def __init__(self, received_bytes: _Optional[_Iterable[int]] = ..., max_chunk_bytes: _Optional[int] = ..., split_tensors: bool = ...) -> None: ...

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

class PushBucketsRequest(_message.Message):
    __slots__ = ("header", "bucket")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    header: BucketsHeader
    bucket: Bucket
    def __init__(self, header: _Optional[_Union[BucketsHeader, _Mapping]] = ..., bucket: _Optional[_Union[Bucket, _Mapping]] = ...) -> None: ...

class BucketsHeader(_message.Message):
    __slots__ = ("update_id", "pid", "fd", "num_bytes")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    pid: int
    fd: int
    num_bytes: int
    def __init__(self, update_id: _Optional[str] = ..., pid: _Optional[int] = ..., fd: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("slot", "parts")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    parts: _containers.RepeatedCompositeFieldContainer[BucketPart]
    def __init__(self, slot: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[BucketPart, _Mapping]]] = ...) -> None: ...

class BucketPart(_message.Message):
    __slots__ = ("tensor_index", "offset", "length", "start")
    TENSOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    tensor_index: int
    offset: int
    length: int
    start: int
    def __init__(self, tensor_index: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., start: _Optional[int] = ...) -> None: ...

class PushBucketsResponse(_message.Message):
    __slots__ = ("slot",)
    SLOT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    def __init__(self, slot: _Optional[int] = ...) -> None: ...

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
