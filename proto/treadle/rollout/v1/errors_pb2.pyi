import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_DEADLINE_REQUIRED: _ClassVar[ErrorReason]
    ERROR_REASON_PROMPT_TOO_LONG: _ClassVar[ErrorReason]
    ERROR_REASON_OVERLOADED: _ClassVar[ErrorReason]
    ERROR_REASON_PAUSED: _ClassVar[ErrorReason]
    ERROR_REASON_WEIGHT_VERSION_BEHIND: _ClassVar[ErrorReason]
    ERROR_REASON_UPDATE_IN_PROGRESS: _ClassVar[ErrorReason]
    ERROR_REASON_UPDATE_UNKNOWN: _ClassVar[ErrorReason]
    ERROR_REASON_TENSOR_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_CHUNK_OUT_OF_ORDER: _ClassVar[ErrorReason]
    ERROR_REASON_CHUNK_CORRUPT: _ClassVar[ErrorReason]
    ERROR_REASON_UPDATE_INCOMPLETE: _ClassVar[ErrorReason]
    ERROR_REASON_ENGINE_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_FIELD: _ClassVar[ErrorReason]
    ERROR_REASON_CAPABILITY_MISSING: _ClassVar[ErrorReason]
    ERROR_REASON_FILE_OUTSIDE_ROOT: _ClassVar[ErrorReason]
    ERROR_REASON_FILE_UNREADABLE: _ClassVar[ErrorReason]
    ERROR_REASON_SHUTTING_DOWN: _ClassVar[ErrorReason]
    ERROR_REASON_UNAUTHENTICATED: _ClassVar[ErrorReason]
    ERROR_REASON_NO_REPLICA: _ClassVar[ErrorReason]
    ERROR_REASON_SESSION_UNKNOWN: _ClassVar[ErrorReason]
    ERROR_REASON_STATE_CONFLICT: _ClassVar[ErrorReason]
    ERROR_REASON_IMAGE_UNREADABLE: _ClassVar[ErrorReason]
    ERROR_REASON_IMAGE_PLACEHOLDERS: _ClassVar[ErrorReason]
    ERROR_REASON_DELTA_BASE_MISMATCH: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_DEADLINE_REQUIRED: ErrorReason
ERROR_REASON_PROMPT_TOO_LONG: ErrorReason
ERROR_REASON_OVERLOADED: ErrorReason
ERROR_REASON_PAUSED: ErrorReason
ERROR_REASON_WEIGHT_VERSION_BEHIND: ErrorReason
ERROR_REASON_UPDATE_IN_PROGRESS: ErrorReason
ERROR_REASON_UPDATE_UNKNOWN: ErrorReason
ERROR_REASON_TENSOR_MISMATCH: ErrorReason
ERROR_REASON_CHUNK_OUT_OF_ORDER: ErrorReason
ERROR_REASON_CHUNK_CORRUPT: ErrorReason
ERROR_REASON_UPDATE_INCOMPLETE: ErrorReason
ERROR_REASON_ENGINE_FAILED: ErrorReason
ERROR_REASON_INVALID_FIELD: ErrorReason
ERROR_REASON_CAPABILITY_MISSING: ErrorReason
ERROR_REASON_FILE_OUTSIDE_ROOT: ErrorReason
ERROR_REASON_FILE_UNREADABLE: ErrorReason
ERROR_REASON_SHUTTING_DOWN: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_NO_REPLICA: ErrorReason
ERROR_REASON_SESSION_UNKNOWN: ErrorReason
ERROR_REASON_STATE_CONFLICT: ErrorReason
ERROR_REASON_IMAGE_UNREADABLE: ErrorReason
ERROR_REASON_IMAGE_PLACEHOLDERS: ErrorReason
ERROR_REASON_DELTA_BASE_MISMATCH: ErrorReason

class InvalidField(_message.Message):
    __slots__ = ("field", "received", "expected")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    field: str
    received: str
    expected: str
    def __init__(self, field: _Optional[str] = ..., received: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...

class PromptTooLong(_message.Message):
    __slots__ = ("prompt_tokens", "context_length")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    context_length: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., context_length: _Optional[int] = ...) -> None: ...

class WeightVersionBehind(_message.Message):
    __slots__ = ("serving", "wanted")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    serving: int
    wanted: int
    def __init__(self, serving: _Optional[int] = ..., wanted: _Optional[int] = ...) -> None: ...

class UpdateInProgress(_message.Message):
    __slots__ = ("update_id", "lease_left")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    lease_left: _duration_pb2.Duration
    def __init__(self, update_id: _Optional[str] = ..., lease_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TensorMismatch(_message.Message):
    __slots__ = ("name", "expected", "received")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    name: str
    expected: str
    received: str
    def __init__(self, name: _Optional[str] = ..., expected: _Optional[str] = ..., received: _Optional[str] = ...) -> None: ...

class ChunkOutOfOrder(_message.Message):
    __slots__ = ("tensor_index", "expected_offset")
    TENSOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OFFSET_FIELD_NUMBER: _ClassVar[int]
    tensor_index: int
    expected_offset: int
    def __init__(self, tensor_index: _Optional[int] = ..., expected_offset: _Optional[int] = ...) -> None: ...

class UpdateIncomplete(_message.Message):
    __slots__ = ("tensor_indices",)
    TENSOR_INDICES_FIELD_NUMBER: _ClassVar[int]
    tensor_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensor_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ImageUnreadable(_message.Message):
    __slots__ = ("image_index", "media_type", "problem")
    IMAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    image_index: int
    media_type: str
    problem: str
    def __init__(self, image_index: _Optional[int] = ..., media_type: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class ImagePlaceholders(_message.Message):
    __slots__ = ("image_index", "first_placeholder", "received", "expected")
    IMAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    image_index: int
    first_placeholder: int
    received: int
    expected: int
    def __init__(self, image_index: _Optional[int] = ..., first_placeholder: _Optional[int] = ..., received: _Optional[int] = ..., expected: _Optional[int] = ...) -> None: ...

class DeltaBaseMismatch(_message.Message):
    __slots__ = ("held", "wanted")
    HELD_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    held: int
    wanted: int
    def __init__(self, held: _Optional[int] = ..., wanted: _Optional[int] = ...) -> None: ...
