from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Image(_message.Message):
    __slots__ = ("mime", "data")
    MIME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    mime: str
    data: bytes
    def __init__(self, mime: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    name: bytes
    arguments: bytes
    def __init__(self, id: _Optional[bytes] = ..., name: _Optional[bytes] = ..., arguments: _Optional[bytes] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "images")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: bytes
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: bytes
    name: bytes
    reasoning: bytes
    images: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[bytes] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[bytes] = ..., name: _Optional[bytes] = ..., reasoning: _Optional[bytes] = ..., images: _Optional[_Iterable[int]] = ...) -> None: ...

class AgentTask(_message.Message):
    __slots__ = ("task_id", "sample_index", "rollout_index", "loop", "messages", "fields", "seed")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOOP_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    task_id: bytes
    sample_index: int
    rollout_index: int
    loop: bytes
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    fields: bytes
    seed: int
    def __init__(self, task_id: _Optional[bytes] = ..., sample_index: _Optional[int] = ..., rollout_index: _Optional[int] = ..., loop: _Optional[bytes] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., fields: _Optional[bytes] = ..., seed: _Optional[int] = ...) -> None: ...

class PlacedImage(_message.Message):
    __slots__ = ("image", "start", "num_tokens")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    image: int
    start: int
    num_tokens: int
    def __init__(self, image: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("first", "num_layers", "top_k", "id_bytes", "data")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    first: int
    num_layers: int
    top_k: int
    id_bytes: int
    data: bytes
    def __init__(self, first: _Optional[int] = ..., num_layers: _Optional[int] = ..., top_k: _Optional[int] = ..., id_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("ids", "logprobs", "spans", "images", "routed_experts", "sampling_masks")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASKS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    logprobs: bytes
    spans: bytes
    images: _containers.RepeatedCompositeFieldContainer[PlacedImage]
    routed_experts: RoutedExperts
    sampling_masks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., spans: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[PlacedImage, _Mapping]]] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ..., sampling_masks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SampleReward(_message.Message):
    __slots__ = ("player", "value")
    PLAYER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    player: bytes
    value: float
    def __init__(self, player: _Optional[bytes] = ..., value: _Optional[float] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: bytes
    text: bytes
    def __init__(self, kind: _Optional[bytes] = ..., text: _Optional[bytes] = ...) -> None: ...

class TrajectoryError(_message.Message):
    __slots__ = ("kind", "message", "traceback", "retryable", "tool", "notes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: bytes
    traceback: bytes
    retryable: bool
    tool: bytes
    notes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[bytes] = ..., traceback: _Optional[bytes] = ..., retryable: bool = ..., tool: _Optional[bytes] = ..., notes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SpanTexts(_message.Message):
    __slots__ = ("text", "begins")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    begins: bytes
    def __init__(self, text: _Optional[bytes] = ..., begins: _Optional[bytes] = ...) -> None: ...

class StoredText(_message.Message):
    __slots__ = ("messages", "response", "spans")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    messages: bytes
    response: bytes
    spans: _containers.RepeatedCompositeFieldContainer[SpanTexts]
    def __init__(self, messages: _Optional[bytes] = ..., response: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[SpanTexts, _Mapping]]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages", "text")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    text: StoredText
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., text: _Optional[_Union[StoredText, _Mapping]] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("task", "num_given", "conversation", "images", "shown", "exchange", "samples", "stop", "assistant_turns", "user_turns", "reward", "sample_rewards", "answer", "tool_rewards", "turn_scores", "metrics", "findings", "error")
    TASK_FIELD_NUMBER: _ClassVar[int]
    NUM_GIVEN_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ASSISTANT_TURNS_FIELD_NUMBER: _ClassVar[int]
    USER_TURNS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_REWARDS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    TOOL_REWARDS_FIELD_NUMBER: _ClassVar[int]
    TURN_SCORES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    task: AgentTask
    num_given: int
    conversation: bytes
    images: _containers.RepeatedCompositeFieldContainer[Image]
    shown: _containers.RepeatedScalarFieldContainer[int]
    exchange: bytes
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    stop: str
    assistant_turns: int
    user_turns: int
    reward: float
    sample_rewards: _containers.RepeatedCompositeFieldContainer[SampleReward]
    answer: bytes
    tool_rewards: _containers.RepeatedScalarFieldContainer[float]
    turn_scores: _containers.RepeatedScalarFieldContainer[float]
    metrics: bytes
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    error: TrajectoryError
    def __init__(self, task: _Optional[_Union[AgentTask, _Mapping]] = ..., num_given: _Optional[int] = ..., conversation: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., shown: _Optional[_Iterable[int]] = ..., exchange: _Optional[bytes] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., stop: _Optional[str] = ..., assistant_turns: _Optional[int] = ..., user_turns: _Optional[int] = ..., reward: _Optional[float] = ..., sample_rewards: _Optional[_Iterable[_Union[SampleReward, _Mapping]]] = ..., answer: _Optional[bytes] = ..., tool_rewards: _Optional[_Iterable[float]] = ..., turn_scores: _Optional[_Iterable[float]] = ..., metrics: _Optional[bytes] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., error: _Optional[_Union[TrajectoryError, _Mapping]] = ...) -> None: ...

class StoredGroup(_message.Message):
    __slots__ = ("number", "birth", "members")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    birth: int
    members: _containers.RepeatedCompositeFieldContainer[StoredMember]
    def __init__(self, number: _Optional[int] = ..., birth: _Optional[int] = ..., members: _Optional[_Iterable[_Union[StoredMember, _Mapping]]] = ...) -> None: ...

class StoredMember(_message.Message):
    __slots__ = ("rollout_index", "trajectory", "messages_crc32")
    ROLLOUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_CRC32_FIELD_NUMBER: _ClassVar[int]
    rollout_index: int
    trajectory: Trajectory
    messages_crc32: int
    def __init__(self, rollout_index: _Optional[int] = ..., trajectory: _Optional[_Union[Trajectory, _Mapping]] = ..., messages_crc32: _Optional[int] = ...) -> None: ...

class FinishedSpan(_message.Message):
    __slots__ = ("name", "trace_id", "span_id", "parent_id", "start_unix_ns", "duration_ns", "attributes", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    trace_id: str
    span_id: str
    parent_id: str
    start_unix_ns: int
    duration_ns: int
    attributes: bytes
    error: SpanError
    def __init__(self, name: _Optional[bytes] = ..., trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., parent_id: _Optional[str] = ..., start_unix_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., attributes: _Optional[bytes] = ..., error: _Optional[_Union[SpanError, _Mapping]] = ...) -> None: ...

class SpanError(_message.Message):
    __slots__ = ("type", "message")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    type: bytes
    message: bytes
    def __init__(self, type: _Optional[bytes] = ..., message: _Optional[bytes] = ...) -> None: ...
