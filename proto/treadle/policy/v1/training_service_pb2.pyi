from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SendBatchRequest(_message.Message):
    __slots__ = ("shard", "memory")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    shard: Shard
    memory: bytes
    def __init__(self, shard: _Optional[_Union[Shard, _Mapping]] = ..., memory: _Optional[bytes] = ...) -> None: ...

class SendBatchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Shard(_message.Message):
    __slots__ = ("batch", "number", "memory_bytes", "shards", "lengths", "trajectories", "advantages", "moved", "present", "runs", "bounds", "ids", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns", "stale", "selected", "token_advantages", "extras", "images")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OLD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REF_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    batch: int
    number: int
    memory_bytes: int
    shards: Array
    lengths: Array
    trajectories: Array
    advantages: Array
    moved: Array
    present: Array
    runs: Array
    bounds: Array
    ids: Array
    rollout_logprobs: Array
    old_logprobs: Array
    ref_logprobs: Array
    values: Array
    returns: Array
    stale: Array
    selected: Array
    token_advantages: Array
    extras: _containers.RepeatedCompositeFieldContainer[SequenceExtras]
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, batch: _Optional[int] = ..., number: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., shards: _Optional[_Union[Array, _Mapping]] = ..., lengths: _Optional[_Union[Array, _Mapping]] = ..., trajectories: _Optional[_Union[Array, _Mapping]] = ..., advantages: _Optional[_Union[Array, _Mapping]] = ..., moved: _Optional[_Union[Array, _Mapping]] = ..., present: _Optional[_Union[Array, _Mapping]] = ..., runs: _Optional[_Union[Array, _Mapping]] = ..., bounds: _Optional[_Union[Array, _Mapping]] = ..., ids: _Optional[_Union[Array, _Mapping]] = ..., rollout_logprobs: _Optional[_Union[Array, _Mapping]] = ..., old_logprobs: _Optional[_Union[Array, _Mapping]] = ..., ref_logprobs: _Optional[_Union[Array, _Mapping]] = ..., values: _Optional[_Union[Array, _Mapping]] = ..., returns: _Optional[_Union[Array, _Mapping]] = ..., stale: _Optional[_Union[Array, _Mapping]] = ..., selected: _Optional[_Union[Array, _Mapping]] = ..., token_advantages: _Optional[_Union[Array, _Mapping]] = ..., extras: _Optional[_Iterable[_Union[SequenceExtras, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("element_type", "offset", "length")
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    element_type: str
    offset: int
    length: int
    def __init__(self, element_type: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class SequenceExtras(_message.Message):
    __slots__ = ("routed_experts", "images", "sampling_mask_sizes", "sampling_masks")
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASK_SIZES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASKS_FIELD_NUMBER: _ClassVar[int]
    routed_experts: RoutedExperts
    images: _containers.RepeatedCompositeFieldContainer[PlacedImage]
    sampling_mask_sizes: Array
    sampling_masks: Array
    def __init__(self, routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ..., images: _Optional[_Iterable[_Union[PlacedImage, _Mapping]]] = ..., sampling_mask_sizes: _Optional[_Union[Array, _Mapping]] = ..., sampling_masks: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

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
    data: Array
    def __init__(self, first: _Optional[int] = ..., num_layers: _Optional[int] = ..., top_k: _Optional[int] = ..., id_bytes: _Optional[int] = ..., data: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class PlacedImage(_message.Message):
    __slots__ = ("image", "start", "num_tokens")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    image: int
    start: int
    num_tokens: int
    def __init__(self, image: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("mime", "data")
    MIME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    mime: str
    data: Array
    def __init__(self, mime: _Optional[str] = ..., data: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class LogProbsRequest(_message.Message):
    __slots__ = ("batch", "temperature", "reference")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    batch: int
    temperature: float
    reference: bool
    def __init__(self, batch: _Optional[int] = ..., temperature: _Optional[float] = ..., reference: bool = ...) -> None: ...

class LogProbsResponse(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ...) -> None: ...

class LogprobSumsRequest(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: int
    def __init__(self, batch: _Optional[int] = ...) -> None: ...

class LogprobSumsResponse(_message.Message):
    __slots__ = ("sums",)
    SUMS_FIELD_NUMBER: _ClassVar[int]
    sums: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sums: _Optional[_Iterable[float]] = ...) -> None: ...

class MeasureReferenceRequest(_message.Message):
    __slots__ = ("batch", "algorithm", "temperature")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    batch: int
    algorithm: str
    temperature: float
    def __init__(self, batch: _Optional[int] = ..., algorithm: _Optional[str] = ..., temperature: _Optional[float] = ...) -> None: ...

class MeasureReferenceResponse(_message.Message):
    __slots__ = ("kl", "old_logprobs", "ref_logprobs")
    KL_FIELD_NUMBER: _ClassVar[int]
    OLD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REF_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    kl: bytes
    old_logprobs: bytes
    ref_logprobs: bytes
    def __init__(self, kl: _Optional[bytes] = ..., old_logprobs: _Optional[bytes] = ..., ref_logprobs: _Optional[bytes] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("batch", "algorithm", "temperature", "free_memory")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    batch: int
    algorithm: str
    temperature: float
    free_memory: bool
    def __init__(self, batch: _Optional[int] = ..., algorithm: _Optional[str] = ..., temperature: _Optional[float] = ..., free_memory: bool = ...) -> None: ...

class UpdateResponse(_message.Message):
    __slots__ = ("steps", "broken", "logprobs_s", "mismatch", "tokens")
    class MismatchEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_S_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepStats]
    broken: str
    logprobs_s: float
    mismatch: _containers.ScalarMap[str, float]
    tokens: TokenValues
    def __init__(self, steps: _Optional[_Iterable[_Union[StepStats, _Mapping]]] = ..., broken: _Optional[str] = ..., logprobs_s: _Optional[float] = ..., mismatch: _Optional[_Mapping[str, float]] = ..., tokens: _Optional[_Union[TokenValues, _Mapping]] = ...) -> None: ...

class StepStats(_message.Message):
    __slots__ = ("step", "loss", "grad_norm", "skipped", "learning_rate", "num_sequences", "num_computed", "num_tokens", "num_rows", "num_loss_tokens", "num_micro_batches", "time_s", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    grad_norm: float
    skipped: bool
    learning_rate: float
    num_sequences: int
    num_computed: int
    num_tokens: int
    num_rows: int
    num_loss_tokens: int
    num_micro_batches: int
    time_s: float
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., grad_norm: _Optional[float] = ..., skipped: bool = ..., learning_rate: _Optional[float] = ..., num_sequences: _Optional[int] = ..., num_computed: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_loss_tokens: _Optional[int] = ..., num_micro_batches: _Optional[int] = ..., time_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TokenValues(_message.Message):
    __slots__ = ("logprobs", "entropy")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    entropy: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., entropy: _Optional[bytes] = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("batch", "algorithm", "temperature", "keep_tokens")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    KEEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    algorithm: str
    temperature: float
    keep_tokens: bool
    def __init__(self, batch: _Optional[int] = ..., algorithm: _Optional[str] = ..., temperature: _Optional[float] = ..., keep_tokens: bool = ...) -> None: ...

class ForwardBackwardResponse(_message.Message):
    __slots__ = ("loss", "num_sequences", "num_computed", "num_tokens", "num_rows", "num_loss_tokens", "num_micro_batches", "time_s", "metrics", "tokens")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LOSS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    loss: float
    num_sequences: int
    num_computed: int
    num_tokens: int
    num_rows: int
    num_loss_tokens: int
    num_micro_batches: int
    time_s: float
    metrics: _containers.ScalarMap[str, float]
    tokens: TokenValues
    def __init__(self, loss: _Optional[float] = ..., num_sequences: _Optional[int] = ..., num_computed: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_loss_tokens: _Optional[int] = ..., num_micro_batches: _Optional[int] = ..., time_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., tokens: _Optional[_Union[TokenValues, _Mapping]] = ...) -> None: ...

class OptimizerStepRequest(_message.Message):
    __slots__ = ("adamw",)
    ADAMW_FIELD_NUMBER: _ClassVar[int]
    adamw: AdamW
    def __init__(self, adamw: _Optional[_Union[AdamW, _Mapping]] = ...) -> None: ...

class AdamW(_message.Message):
    __slots__ = ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip")
    LR_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_FIELD_NUMBER: _ClassVar[int]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float
    def __init__(self, lr: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., grad_clip: _Optional[float] = ...) -> None: ...

class OptimizerStepResponse(_message.Message):
    __slots__ = ("step", "grad_norm", "skipped", "learning_rate")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    step: int
    grad_norm: float
    skipped: bool
    learning_rate: float
    def __init__(self, step: _Optional[int] = ..., grad_norm: _Optional[float] = ..., skipped: bool = ..., learning_rate: _Optional[float] = ...) -> None: ...

class FineTuneRequest(_message.Message):
    __slots__ = ("batch", "aggregation")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    batch: int
    aggregation: str
    def __init__(self, batch: _Optional[int] = ..., aggregation: _Optional[str] = ...) -> None: ...

class FineTuneResponse(_message.Message):
    __slots__ = ("steps", "broken")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepStats]
    broken: str
    def __init__(self, steps: _Optional[_Iterable[_Union[StepStats, _Mapping]]] = ..., broken: _Optional[str] = ...) -> None: ...

class ValuesRequest(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: int
    def __init__(self, batch: _Optional[int] = ...) -> None: ...

class ValuesResponse(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...

class UpdateCriticRequest(_message.Message):
    __slots__ = ("batch", "algorithm", "epochs", "free_memory")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    batch: int
    algorithm: str
    epochs: int
    free_memory: bool
    def __init__(self, batch: _Optional[int] = ..., algorithm: _Optional[str] = ..., epochs: _Optional[int] = ..., free_memory: bool = ...) -> None: ...

class UpdateCriticResponse(_message.Message):
    __slots__ = ("steps", "broken")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepStats]
    broken: str
    def __init__(self, steps: _Optional[_Iterable[_Union[StepStats, _Mapping]]] = ..., broken: _Optional[str] = ...) -> None: ...
