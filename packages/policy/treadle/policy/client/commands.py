"""Commands to the policy ranks, and their answers.

Every command goes to all ranks before any answer is awaited, because the ranks execute it together
(see `policy/backend.py`). All values are plain and picklable; they travel over an authenticated
connection between processes of one run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from treadle.agent_loop import FloatArray
from treadle.policy.client.types import (
    ElementType,
    LossAggregation,
    StepStats,
    TokenValues,
    TrainSequence,
)
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.critic import CriticConfig
from treadle.policy.config.policy import PolicyConfig
from treadle.policy.weight_sync.server_security import ServerSecurity

__all__ = [
    "AUTHKEY_VARIABLE",
    "Alive",
    "Broadcast",
    "BroadcastReport",
    "Command",
    "ComputeDelta",
    "DeltaReport",
    "Done",
    "Failed",
    "FineTune",
    "InitModel",
    "Load",
    "LoadCritic",
    "LogprobSums",
    "MeasureReference",
    "MeasuredReference",
    "OfSequences",
    "OffloadReport",
    "OpenGroup",
    "OpenRendezvous",
    "PlainCommand",
    "Push",
    "PushSharedMemory",
    "PushTarget",
    "ReportOffload",
    "ReportTime",
    "Save",
    "SaveAdapter",
    "SaveCritic",
    "SaveHf",
    "SendReport",
    "Sharded",
    "SharedMemoryTarget",
    "Specs",
    "Stop",
    "Update",
    "UpdateCritic",
    "UpdateStats",
    "Values",
    "WriteFiles",
]

AUTHKEY_VARIABLE = "TREADLE_AUTHKEY"
"""Environment variable with the hexadecimal key of the connections between driver and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRendezvous:
    """Listen for the other ranks, before the model exists. Answer: `host:port`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitModel:
    """Join the other ranks and load the model. Answer: the optimizer steps taken, 0.

    Attributes:
        with_reference: Whether to keep a reference policy.
        reference_path: Its model's folder; None: a copy of the weights.
        local_rank: Which of the GPUs that the process sees is its own.
        critic: The critic to load beside the policy; None: none.
    """

    config: PolicyConfig
    model_path: Path
    with_reference: bool
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    local_rank: int
    reference_path: Path | None = None
    critic: CriticConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Take all optimizer steps of one batch. Answer: `UpdateStats`, `tokens` on rank 0 only.

    Attributes:
        temperature: What the sequences were sampled with.
        free_memory: Whether to give back cached device memory afterwards, for others to use.
    """

    sequences: tuple[TrainSequence, ...]
    algorithm: AlgorithmConfig
    temperature: float
    free_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureReference:
    """Compare the policy with the reference. Answer: `MeasuredReference` of rank 0, else None.

    Attributes:
        temperature: What the sequences were sampled with.
    """

    sequences: tuple[TrainSequence, ...]
    algorithm: AlgorithmConfig
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredReference:
    """The KL of a batch from the reference, before its updates; one [L] array per sequence each.

    Attributes:
        kl: Estimate of KL(policy || reference) at each loss token, in nats.
        old_logprobs: For the update that follows, where it needs them.
        ref_logprobs: The same.
    """

    kl: tuple[FloatArray, ...]
    old_logprobs: tuple[FloatArray, ...] | None = None
    ref_logprobs: tuple[FloatArray, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Compute the critic's values. Answer of rank 0: [L] numbers per sequence; of others: None."""

    sequences: tuple[TrainSequence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCritic:
    """Take all optimizer steps of the critic of one batch. Answer: `UpdateStats`.

    Attributes:
        sequences: With values and returns.
        algorithm: Says how a batch is split, and how losses are reduced.
        epochs: Number of passes over the batch.
        free_memory: See `Update`.
    """

    sequences: tuple[TrainSequence, ...]
    algorithm: AlgorithmConfig
    epochs: int
    free_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTune:
    """Take one optimizer step of supervised fine-tuning. Answer: `UpdateStats`."""

    sequences: tuple[TrainSequence, ...]
    aggregation: LossAggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSums:
    """Answer: of each sequence, the sum of its loss tokens' log-probabilities, in nats."""

    sequences: tuple[TrainSequence, ...]


OfSequences = Update | MeasureReference | Values | UpdateCritic | FineTune | LogprobSums
"""The commands that take sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Execute a command on a batch of which each data-parallel group gets its shard.

    The leading rank of a group gets the shard as frames (`shards.to_frames`), behind the command on
    the same connection, and gives them to its siblings. Answer: the command's.

    Attributes:
        command: Without its sequences.
        num_frames: Number of the frames.
        frames: Those that have come; empty on its way, and on the siblings.
    """

    command: OfSequences
    num_frames: int
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """The result of an `Update`, an `UpdateCritic` or a `FineTune`.

    Attributes:
        broken: What is not finite after it, for a message; None: the model is sound.
        logprobs_s: Seconds spent on old and reference log-probabilities; 0 if none was needed.
        mismatch: See `algorithms.mismatch`, over the whole batch. None means that the metrics of
            the first step have it, for what that step computed.
        tokens: Of each loss token of an `Update`: its log-probability before the first optimizer
            step where that was computed, else in the first step that trained on it; and its entropy
            in that step. Rank 0 has them, the others None.
    """

    steps: tuple[StepStats, ...]
    broken: str | None
    logprobs_s: float
    mismatch: Mapping[str, float] | None = None
    tokens: TokenValues | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """Answer: the `TensorSpec` of every weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTarget:
    """One server, and how much of each tensor it holds already.

    Attributes:
        received_bytes: [number of tensors], in the order of the specs.
    """

    name: str
    address: str
    received_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Stream the weights to the targets. Answer: `SendReport`, for this rank's tensors.

    Attributes:
        element_type: What the servers are sent.
        chunk_bytes: Maximum size of a chunk.
        deadline_s: Of each stream.
        delta: Whether to send the changes found by the last `ComputeDelta` instead of the weights.
    """

    update_id: str
    element_type: ElementType
    targets: tuple[PushTarget, ...]
    chunk_bytes: int
    deadline_s: float
    delta: bool = False
    security: ServerSecurity = field(default_factory=ServerSecurity)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDelta:
    """Keep a copy of the weights and find what changed. Answer: `DeltaReport`, for this rank's.

    Attributes:
        version: Name of the weights.
        base_version: What to compare with, if this rank keeps it.
        element_type: What the servers hold.
    """

    version: int
    base_version: int | None
    element_type: ElementType


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaReport:
    """The changes of one rank's weights, by tensor name.

    Attributes:
        fits: Whether the base was there and every weight is small enough for the encoding.
        encoded_bytes: Size of the encoded changes.
        crc32: CRC-32 of the whole weight as it is now.
    """

    fits: bool
    encoded_bytes: Mapping[str, int]
    crc32: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFiles:
    """Write the weights below `directory`. Answer: `SendReport` with the checksums.

    Attributes:
        element_type: What the servers read.
        version: Name of the weights.
        base_version: If given, write the changes that the last `ComputeDelta` found against this
            version instead of the weights.
    """

    directory: Path
    element_type: ElementType
    version: int
    base_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryTarget:
    """One server of this host."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSharedMemory:
    """Hand the weights to the targets in shared memory. Answer: `SendReport`, for this rank's.

    Attributes:
        element_type: What the servers are sent.
        bucket_bytes: Without `split_tensors`, a bucket may be larger, for one weight.
        deadline_s: Of each stream.
        split_tensors: Whether a weight may be split over several buckets.
    """

    update_id: str
    element_type: ElementType
    targets: tuple[SharedMemoryTarget, ...]
    bucket_bytes: int
    deadline_s: float
    split_tensors: bool = False
    security: ServerSecurity = field(default_factory=ServerSecurity)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Bytes that one rank sent or wrote.

    Attributes:
        num_bytes: Sent to all targets together, written, or shared.
        crc32: Tensor name -> CRC-32 of its bytes; only for files.
        errors: Target name -> why its push broke.
        incompatible: Names in `errors` of servers that cannot work with this trainer, so that no
            attempt can help.
    """

    num_bytes: int
    crc32: Mapping[str, int]
    errors: Mapping[str, str]
    incompatible: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """Serve the store at which a collective group meets. Answer: `host:port`; None if not `rank`.

    Attributes:
        rank: The rank that serves it, the lowest sender.
        group_name: Never used before.
        timeout_s: Maximum wait for a member or a broadcast.
    """

    rank: int
    group_name: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Send the weights through a group, joining it if needed. Answer: `BroadcastReport`.

    Attributes:
        rendezvous: `host:port` of the store.
        world_size: Number of senders and workers.
        bucket_bytes: Size of a bucket; a larger weight has its own.
        element_type: What the servers are sent.
        timeout_s: Maximum wait for a member or a broadcast.
    """

    group_name: str
    backend: Literal["gloo", "nccl"]
    rendezvous: str
    world_size: int
    bucket_bytes: int
    element_type: ElementType
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastReport:
    """Bytes that one rank sent. A group that failed is gone.

    Attributes:
        num_bytes: Counted once, for any number of workers.
        error: Why the group failed, if it did.
        lost: Ranks of the group that did not join or that failed by themselves.
    """

    num_bytes: int
    error: str | None
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write a checkpoint. Answer: None."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCritic:
    """Write a checkpoint of the critic. Answer: None."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHf:
    """Write the weights as a Hugging Face model directory, which must not exist. Answer: None."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAdapter:
    """Write the LoRA adapter, in PEFT's format, as a new directory. Answer: None."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Read a checkpoint. Answer: the optimizer steps that it has taken."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCritic:
    """Read a checkpoint of the critic. Answer: the optimizer steps that it has taken."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOffload:
    """Answer: the `OffloadReport` of this rank's models since the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """Bytes that one rank has off its device, and the time that moving them took.

    Attributes:
        release_s: Seconds in which device memory was released.
        restore_s: Seconds in which it was filled again.
        freed_bytes: Of device memory that is released now.
        host_bytes: Of host memory that holds what was in it.
    """

    release_s: float
    restore_s: float
    freed_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTime:
    """Answer: the seconds of this rank by cause since the last one; see `policy/rank_time.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Leave the other ranks and exit. Answer: None."""


PlainCommand = (
    OpenRendezvous
    | InitModel
    | Update
    | Values
    | UpdateCritic
    | FineTune
    | LogprobSums
    | MeasureReference
    | Specs
    | ComputeDelta
    | Push
    | WriteFiles
    | PushSharedMemory
    | OpenGroup
    | Broadcast
    | Save
    | SaveCritic
    | SaveHf
    | SaveAdapter
    | Load
    | LoadCritic
    | ReportOffload
    | ReportTime
    | Stop
)
Command = PlainCommand | Sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """A sign of life: a rank's first message, and one every so often while a command runs.

    Attributes:
        pid: Of the rank's process.
        node: Name of the machine.
        place: What the rank executes, as `module:line, in function`.
    """

    pid: int
    node: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A command's answer."""

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A command raised; the rank exits after sending this.

    Attributes:
        kind: "input": what the user gave is wrong. "checkpoint": see `CheckpointError`. "peer":
            another rank is gone, so the cause is there. "bug": anything else.
    """

    kind: Literal["input", "checkpoint", "peer", "bug"]
    message: str
    traceback: str
