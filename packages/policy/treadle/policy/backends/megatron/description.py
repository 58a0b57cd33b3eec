"""The Megatron backend's description before a rank starts; see `backends.description`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from treadle.policy.backends.description import (
    BackendDescription,
    BackendLibrary,
    Capabilities,
    MemoryEstimate,
    raised,
)
from treadle.policy.backends.megatron import VERSION, VERSIONS
from treadle.policy.backends.megatron.architecture import MODEL_TYPES, Architecture
from treadle.policy.backends.megatron.experts.check import split_problems, training_problems
from treadle.policy.backends.megatron.memory import estimate_memory
from treadle.policy.backends.vision.shape import NAMING
from treadle.policy.config.policy import LoraConfig

if TYPE_CHECKING:
    from treadle.policy.config.choices import BackendName
    from treadle.policy.config.policy import ParallelConfig, PolicyConfig


class MegatronDescription(BackendDescription):
    """Asks the modules of the backend that need no torch."""

    name: ClassVar[BackendName] = "megatron"
    capabilities: ClassVar[Capabilities] = Capabilities(
        parallel=frozenset({"tensor", "pipeline", "context", "data", "expert"}),
        dtypes=("float32", "bfloat16"),
        lora=True,
        critic=True,
        other_reference=True,
        offload=True,
        routing_replay=True,
        recompute=True,
        shared_prefixes=True,
    )
    library: ClassVar[BackendLibrary | None] = BackendLibrary(
        name="megatron-core", versions=VERSIONS, wanted=VERSION
    )
    model_types: Collection[str] = tuple(MODEL_TYPES)
    vision_types: Collection[str] = tuple(NAMING)

    def read_model(self, folder: Path) -> Architecture:
        """See `BackendDescription.read_model`."""
        return Architecture.from_folder(folder)

    def split_problems(self, model: Architecture, parallel: ParallelConfig) -> Iterator[str]:
        """See `BackendDescription.split_problems`."""
        for tensor, pipeline in ((parallel.tensor, 1), (1, parallel.pipeline)):
            check = partial(model.check_parallel, tensor=tensor, pipeline=pipeline)
            for problem in raised(check):
                yield f"{problem}: take a size that does"
        yield from raised(partial(model.check_context, parallel.context))
        yield from split_problems(model.experts, parallel)

    def training_problems(self, model: Architecture, policy: PolicyConfig) -> Iterator[str]:
        """See `BackendDescription.training_problems`."""
        yield from training_problems(model, policy)
        yield from raised(partial(model.check_sharing, policy.share_prefixes))
        if policy.lora.rank:
            yield from raised(partial(model.adapted, policy.lora.targets))

    def reference_problems(self, model: Architecture, reference: Architecture) -> Iterator[str]:
        """See `BackendDescription.reference_problems`."""
        return raised(partial(model.check_reference, reference))

    def adapters(self, model: Architecture, lora: LoraConfig) -> tuple[Sequence[str], int]:
        """See `BackendDescription.adapters`."""
        names = model.adapted(lora.targets)
        sizes = [sum(model.matrices[name]) for name in names]
        return names, model.num_layers * lora.rank * sum(sizes)

    def memory(
        self,
        model: Architecture,
        policy: PolicyConfig,
        *,
        rows: int,
        reference: bool = False,
        other_reference: Architecture | None = None,
    ) -> MemoryEstimate:
        """See `BackendDescription.memory`."""
        return estimate_memory(
            model, policy, rows=rows, reference=reference, other_reference=other_reference
        )

    def critic_memory(
        self, model: Architecture, policy: PolicyConfig, *, rows: int
    ) -> MemoryEstimate:
        """See `BackendDescription.critic_memory`."""
        # It trains all weights, and has no output layer: as many as a tied model.
        whole = policy.model_copy(update={"lora": LoraConfig()})
        return estimate_memory(replace(model, tied=True), whole, rows=rows)
