"""How new weights reach the rollout servers: the section `sync` of a run's configuration."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from treadle.policy.config.base import Count, Seconds, Section, kind_alone

__all__ = [
    "CollectiveTransportConfig",
    "DeltaConfig",
    "FileTransportConfig",
    "InFlight",
    "InlineTransportConfig",
    "SharedMemoryTransportConfig",
    "WeightSyncConfig",
]

InFlight = Literal["drain", "interrupt", "continue"]


class InlineTransportConfig(Section):
    """Weights are sent in the gRPC stream. For small models and servers on other hosts."""

    kind: Literal["inline"] = "inline"
    chunk_bytes: Annotated[int, Field(ge=4096, le=4_000_000)] = 1 << 20
    """Bytes per message; a server may request less."""


class FileTransportConfig(Section):
    """Weights are written to safetensors files that the servers can read."""

    kind: Literal["file"] = "file"
    directory: Path | None = None
    """Directory of the files; servers read nothing outside it. Null: in the run directory."""


class SharedMemoryTransportConfig(Section):
    """Policy ranks and servers of one host share memory; the fastest transport there."""

    kind: Literal["shared_memory"] = "shared_memory"
    bucket_bytes: Annotated[int, Field(ge=1 << 16)] = 16 << 20
    """Maximum bytes of a bucket, unless a single weight is larger. Two buckets are held by each
    sending rank with shared_memory (default 16 MiB), by each member of the group with collective
    (256 MiB). In shared memory a larger weight is split, except for vLLM and SGLang in place, which
    need it whole."""


class CollectiveTransportConfig(Section):
    """Weights are broadcast in a torch.distributed group, in place; for GPUs and many servers."""

    kind: Literal["collective"] = "collective"
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: through host memory, on any machine. nccl: from GPU to GPU; each policy rank and each
    worker of a server must have its own GPU. Neither encrypts."""
    bucket_bytes: Annotated[int, Field(ge=1 << 16)] = 1 << 28
    """Maximum bytes of a bucket, unless a single weight is larger. Two buckets are held by each
    sending rank with shared_memory (default 16 MiB), by each member of the group with collective
    (256 MiB). In shared memory a larger weight is split, except for vLLM and SGLang in place, which
    need it whole."""
    timeout_s: Annotated[float, Field(gt=0, le=300)] = 60.0
    """Maximum time to wait for all members to join, and for each broadcast. After that the update
    starts again without the servers that are gone."""
    allow_plaintext: bool = False
    """Let weights travel between hosts, where the group is not encrypted. What else goes to the
    servers keeps its TLS."""


class DeltaConfig(Section):
    """Sends only the elements that changed since the previous version."""

    enabled: bool = False
    """Each policy rank then keeps a copy of its weights in host memory, and each server a copy of
    all weights. A server without the previous version gets everything. Works with the transports
    inline and file, not in place."""
    full_every: Count = 50
    """Maximum number of consecutive deltas; then all servers get everything once."""


class WeightSyncConfig(Section):
    """How new weights reach the rollout servers."""

    transport: Annotated[
        Annotated[
            InlineTransportConfig
            | FileTransportConfig
            | SharedMemoryTransportConfig
            | CollectiveTransportConfig,
            Field(discriminator="kind"),
        ],
        BeforeValidator(kind_alone),
    ] = InlineTransportConfig()
    """How the bytes are transferred."""
    in_place: bool = False
    """Overwrite the servers' weights one by one as they arrive, instead of holding a second copy
    until all are there. in_flight then applies from the first byte on, and a server whose update
    fails samples nothing until a later update succeeds."""
    in_flight: InFlight = "drain"
    """What to do with in-flight completions when new weights arrive. drain: they finish first, on
    the old weights. interrupt: they stop, and are sent again with the tokens sampled so far.
    continue: they pause and continue with the new weights, if the engine supports it. In all cases
    each token is labelled with the version of the weights that sampled it."""
    delta: DeltaConfig = DeltaConfig()
    """Sends only the elements that changed."""
    lease_s: Annotated[float, Field(ge=1)] = 60.0
    """A server drops an update after this time without a message from the trainer."""
    control_deadline_s: Seconds = 10.0
    """Deadline of the calls Begin, Get and Abort."""
    push_deadline_s: Seconds = 30.0
    """Deadline of one Push; one second per 50 MB is added."""
    commit_deadline_s: Seconds = 120.0
    """Deadline of Commit, which includes what in_flight does with in-flight completions."""
    max_push_attempts: Count = 3
    """Maximum attempts to push one update to one server; a broken push resumes where it stopped.
    Also the maximum attempts of Begin and Commit when their answer is lost."""

    @property
    def updates_in_place(self) -> bool:
        """Whether servers overwrite their weights as new ones come."""
        return self.in_place or isinstance(self.transport, CollectiveTransportConfig)

    @model_validator(mode="after")
    def _delta_fits(self) -> Self:
        fits = isinstance(self.transport, InlineTransportConfig | FileTransportConfig)
        if self.delta.enabled and (self.in_place or not fits):
            raise ValueError(
                "sync.delta.enabled goes with sync.transport.kind=inline or file, and with "
                f"sync.in_place=false, not with {self.transport.kind} and in_place="
                f"{self.in_place}: on one host, shared_memory sends everything faster than a "
                "delta is made"
            )
        return self
