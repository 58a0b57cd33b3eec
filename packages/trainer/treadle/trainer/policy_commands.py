"""Commands to the policy ranks, and their answers.

Every command goes to all ranks before any answer is awaited, because the ranks work on it
together (see `treadle.trainer.policy`). All values are plain and picklable; they travel over an
authenticated connection between processes of one run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treadle.trainer.config.algorithm import AlgorithmConfig
from treadle.trainer.config.policy import PolicyConfig
from treadle.trainer.policy import ElementType, StepStats, TrainSequence

__all__ = [
    "AUTHKEY_VARIABLE",
    "Build",
    "Command",
    "Done",
    "Failed",
    "Load",
    "Meet",
    "Push",
    "PushTarget",
    "Save",
    "SendReport",
    "Specs",
    "Stop",
    "Update",
    "UpdateStats",
    "WriteFiles",
]

AUTHKEY_VARIABLE = "TREADLE_AUTHKEY"
"""Environment variable with the hexadecimal key of the connections between driver and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Asks a rank for a port at which the others can find it. Answer: its `host:port`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What an `Update` did."""

    steps: tuple[StepStats, ...]
    logprobs_s: float
    """Seconds spent on old and reference log-probabilities; 0 where none was needed."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFiles:
    """Write the weights below `directory`. Answer: `SendReport` with the checksums."""

    directory: Path
    element_type: ElementType


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """What one rank sent or wrote."""

    num_bytes: int
    """Sent to all targets together, or written."""
    crc32: Mapping[str, int]
    """Tensor name -> CRC-32 of its bytes; of files only."""
    errors: Mapping[str, str]
    """Target name -> why its push broke."""


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


Command = Meet | Build | Update | Specs | Push | WriteFiles | Save | Load | Stop


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
