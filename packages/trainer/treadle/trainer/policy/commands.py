"""Commands to the policy ranks, and their answers.

Every command goes to all ranks before any answer is awaited, because the ranks work on it
together (see `policy/backend.py`). All values are plain and picklable; they travel over an
authenticated connection between processes of one run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from treadle.trainer.config.algorithm import AlgorithmConfig
from treadle.trainer.config.policy import PolicyConfig
from treadle.trainer.policy.types import ElementType, StepStats, TrainSequence
from treadle.trainer.rollout.server_security import ServerSecurity

__all__ = [
    "AUTHKEY_VARIABLE",
    "Broadcast",
    "BroadcastReport",
    "Command",
    "ComputeDelta",
    "DeltaReport",
    "Done",
    "Failed",
    "InitModel",
    "Load",
    "OpenGroup",
    "OpenRendezvous",
    "Push",
    "PushSharedMemory",
    "PushTarget",
    "Save",
    "SendReport",
    "SharedMemoryTarget",
    "Specs",
    "Stop",
    "Update",
    "UpdateStats",
    "WriteFiles",
]

AUTHKEY_VARIABLE = "TREADLE_AUTHKEY"
"""Environment variable with the hexadecimal key of the connections between driver and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRendezvous:
    """Lets a rank listen for the others, before it is built. Answer: its `host:port`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitModel:
    """Join the other ranks and load the model. Answer: the optimizer steps taken, 0."""

    config: PolicyConfig
    model_path: Path
    with_reference: bool
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """All optimizer steps that one batch gives. Answer: `UpdateStats`, the same on all ranks."""

    sequences: tuple[TrainSequence, ...]
    algorithm: AlgorithmConfig
    temperature: float
    """What the sequences were sampled with."""
    free_memory: bool = False
    """Whether to give device memory that is only cached back afterwards, for others to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What an `Update` did."""

    steps: tuple[StepStats, ...]
    logprobs_s: float
    """Seconds spent on old and reference log-probabilities; 0 where none was needed."""
    mismatch: Mapping[str, float] | None = None
    """See `algorithms.mismatch`, over the whole batch; None: the first step's metrics have it, of
    what that step computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """Answer: the `TensorSpec` of every weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTarget:
    """One server, and how much of each tensor it holds already."""

    name: str
    address: str
    received_bytes: tuple[int, ...]
    """[number of tensors], in the order of the specs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Stream the weights to the targets. Answer: `SendReport`, of this rank's tensors."""

    update_id: str
    element_type: ElementType
    targets: tuple[PushTarget, ...]
    chunk_bytes: int
    deadline_s: float
    delta: bool = False
    """Send what the last `ComputeDelta` found to have changed, instead of the weights."""
    security: ServerSecurity = field(default_factory=ServerSecurity)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDelta:
    """Keep a copy of the weights, and find what changed. Answer: `DeltaReport`, of this rank's."""

    version: int
    """Name of the weights."""
    base_version: int | None
    """That they are compared with, if this rank keeps it."""
    element_type: ElementType


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaReport:
    """What changed in one rank's weights. By tensor name."""

    fits: bool
    """Whether the base was there, and no weight has too many elements for the encoding."""
    encoded_bytes: Mapping[str, int]
    crc32: Mapping[str, int]
    """Of the whole weight, now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFiles:
    """Write the weights below `directory`. Answer: `SendReport` with the checksums."""

    directory: Path
    element_type: ElementType
    version: int
    """Name of the weights."""
    base_version: int | None = None
    """Write what the last `ComputeDelta`, with this one, found to have changed, instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryTarget:
    """One server of this host."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSharedMemory:
    """Hand the weights to the targets in shared memory. Answer: `SendReport`, of this rank's."""

    update_id: str
    element_type: ElementType
    targets: tuple[SharedMemoryTarget, ...]
    bucket_bytes: int
    """Without `split_tensors`, a bucket may be larger, for one weight."""
    deadline_s: float
    split_tensors: bool = False
    """Whether a weight may lie in several buckets."""
    security: ServerSecurity = field(default_factory=ServerSecurity)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """What one rank sent or wrote."""

    num_bytes: int
    """Sent to all targets together, or written, or shared."""
    crc32: Mapping[str, int]
    """Tensor name -> CRC-32 of its bytes; of files only."""
    errors: Mapping[str, str]
    """Target name -> why its push broke."""
    incompatible: tuple[str, ...] = ()
    """Names of `errors` that no attempt can help: trainer and servers do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """Open the place where a collective group meets. Answer: its `host:port`; of others, None."""

    rank: int
    """The lowest sender."""
    group_name: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Send the weights through a group, joining it if need be. Answer: `BroadcastReport`."""

    group_name: str
    backend: Literal["gloo", "nccl"]
    rendezvous: str
    world_size: int
    """Senders and workers."""
    bucket_bytes: int
    element_type: ElementType
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastReport:
    """What one rank sent; a group that failed is gone."""

    num_bytes: int
    """Once, whatever the number of workers."""
    error: str | None
    lost: tuple[int, ...]
    """Ranks of the group that did not come, or that failed by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write a checkpoint. Answer: None."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Read a checkpoint. Answer: the optimizer steps that it has taken."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Leave the other ranks and exit. Answer: None."""


Command = (
    OpenRendezvous
    | InitModel
    | Update
    | Specs
    | ComputeDelta
    | Push
    | WriteFiles
    | PushSharedMemory
    | OpenGroup
    | Broadcast
    | Save
    | Load
    | Stop
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A command's answer."""

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A command that raised; the rank exits after sending it."""

    kind: Literal["input", "checkpoint", "peer", "bug"]
    """input: what the user gave is wrong. peer: another rank went away, so that the cause is
    there. bug: anything else."""
    message: str
    traceback: str
