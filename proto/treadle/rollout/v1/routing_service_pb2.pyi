import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("session_id", "context_tokens", "current_address", "avoid_addresses")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AVOID_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    context_tokens: int
    current_address: str
    avoid_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., context_tokens: _Optional[int] = ..., current_address: _Optional[str] = ..., avoid_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("address", "moved", "valid_for")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    VALID_FOR_FIELD_NUMBER: _ClassVar[int]
    address: str
    moved: bool
    valid_for: _duration_pb2.Duration
    def __init__(self, address: _Optional[str] = ..., moved: bool = ..., valid_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class FinishSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class FinishSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenSessionsRequest(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[OpenSessionRequest]
    def __init__(self, sessions: _Optional[_Iterable[_Union[OpenSessionRequest, _Mapping]]] = ...) -> None: ...

class OpenSessionsResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[OpenSessionResponse]
    def __init__(self, answers: _Optional[_Iterable[_Union[OpenSessionResponse, _Mapping]]] = ...) -> None: ...

class FinishSessionsRequest(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class FinishSessionsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterReplicaRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class RegisterReplicaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReplicaRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class DrainReplicaResponse(_message.Message):
    __slots__ = ("open_sessions",)
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    open_sessions: int
    def __init__(self, open_sessions: _Optional[int] = ...) -> None: ...

class RemoveReplicaRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class RemoveReplicaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReplicasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReplicasResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("address", "draining", "open_sessions", "occupied_time")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    OCCUPIED_TIME_FIELD_NUMBER: _ClassVar[int]
    address: str
    draining: bool
    open_sessions: int
    occupied_time: _duration_pb2.Duration
    def __init__(self, address: _Optional[str] = ..., draining: bool = ..., open_sessions: _Optional[int] = ..., occupied_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
