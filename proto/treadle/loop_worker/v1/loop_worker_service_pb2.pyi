from treadle.loop_worker.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class WorkResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("setup", "begin", "give", "bound", "weights", "end", "stop")
    SETUP_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    GIVE_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    setup: Setup
    begin: Begin
    give: Give
    bound: Bound
    weights: Weights
    end: End
    stop: Stop
    def __init__(self, setup: _Optional[_Union[Setup, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., give: _Optional[_Union[Give, _Mapping]] = ..., bound: _Optional[_Union[Bound, _Mapping]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("alive", "ready", "refused", "asks", "ended", "run_failed", "warned")
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RUN_FAILED_FIELD_NUMBER: _ClassVar[int]
    WARNED_FIELD_NUMBER: _ClassVar[int]
    alive: Alive
    ready: Ready
    refused: Refused
    asks: Asks
    ended: Ended
    run_failed: RunFailed
    warned: Warned
    def __init__(self, alive: _Optional[_Union[Alive, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., asks: _Optional[_Union[Asks, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., run_failed: _Optional[_Union[RunFailed, _Mapping]] = ..., warned: _Optional[_Union[Warned, _Mapping]] = ...) -> None: ...

class Setup(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: bytes
    def __init__(self, settings: _Optional[bytes] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("run", "settings", "max_in_flight", "recording", "parent", "attributes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    run: int
    settings: bytes
    max_in_flight: int
    recording: bool
    parent: Parent
    attributes: bytes
    def __init__(self, run: _Optional[int] = ..., settings: _Optional[bytes] = ..., max_in_flight: _Optional[int] = ..., recording: bool = ..., parent: _Optional[_Union[Parent, _Mapping]] = ..., attributes: _Optional[bytes] = ...) -> None: ...

class Parent(_message.Message):
    __slots__ = ("trace_id", "span_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    span_id: str
    def __init__(self, trace_id: _Optional[str] = ..., span_id: _Optional[str] = ...) -> None: ...

class Give(_message.Message):
    __slots__ = ("run", "tasks", "images", "text")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    run: int
    tasks: _containers.RepeatedCompositeFieldContainer[GivenTask]
    images: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Image]
    text: bool
    def __init__(self, run: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[GivenTask, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[_trajectory_pb2.Image, _Mapping]]] = ..., text: bool = ...) -> None: ...

class GivenTask(_message.Message):
    __slots__ = ("number", "task", "attributes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    task: _trajectory_pb2.AgentTask
    attributes: bytes
    def __init__(self, number: _Optional[int] = ..., task: _Optional[_Union[_trajectory_pb2.AgentTask, _Mapping]] = ..., attributes: _Optional[bytes] = ...) -> None: ...

class Bound(_message.Message):
    __slots__ = ("run", "max_in_flight")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    run: int
    max_in_flight: int
    def __init__(self, run: _Optional[int] = ..., max_in_flight: _Optional[int] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: int
    def __init__(self, run: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alive(_message.Message):
    __slots__ = ("pid", "node", "place")
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    node: str
    place: str
    def __init__(self, pid: _Optional[int] = ..., node: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Refused(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: bytes
    def __init__(self, message: _Optional[bytes] = ...) -> None: ...

class Asks(_message.Message):
    __slots__ = ("run", "count")
    RUN_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    run: int
    count: int
    def __init__(self, run: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("run", "number", "trajectory", "spans", "asks")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    run: int
    number: int
    trajectory: _trajectory_pb2.Trajectory
    spans: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.FinishedSpan]
    asks: int
    def __init__(self, run: _Optional[int] = ..., number: _Optional[int] = ..., trajectory: _Optional[_Union[_trajectory_pb2.Trajectory, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[_trajectory_pb2.FinishedSpan, _Mapping]]] = ..., asks: _Optional[int] = ...) -> None: ...

class RunFailed(_message.Message):
    __slots__ = ("run", "message", "traceback")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    run: int
    message: bytes
    traceback: bytes
    def __init__(self, run: _Optional[int] = ..., message: _Optional[bytes] = ..., traceback: _Optional[bytes] = ...) -> None: ...

class Warned(_message.Message):
    __slots__ = ("level", "message")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    level: int
    message: bytes
    def __init__(self, level: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...
