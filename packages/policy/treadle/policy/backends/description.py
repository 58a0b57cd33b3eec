"""Descriptions of backends and of their models, for use before any rank starts. Needs no torch.

`registry.describe` returns the description of a backend by name. Preflight reads it, and the policy
contract suite skips the features that a backend does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from treadle.policy.client.hf_files import DEQUANTISED, quantisation, quantisation_method

if TYPE_CHECKING:
    from treadle.policy.config.choices import BackendName, ElementType, OptimizerName
    from treadle.policy.config.critic import CriticConfig
    from treadle.policy.config.policy import (
        LoraConfig,
        OffloadConfig,
        ParallelConfig,
        PolicyConfig,
    )


NUMBERS_AT_ONCE: Final = 1 << 20
"""Minimum number of logits that a CPU processes at a time."""


class UnsupportedModelError(ValueError):
    """The model needs something that the backend does not compute."""


def refuse_quantised(folder: Path, *, but: Collection[str] = ()) -> None:
    """Rejects a model folder with quantised weights.

    Args:
        but: Values of `quant_method` that are accepted.

    Raises:
        UnsupportedModelError: The weights are quantised by another method.
    """
    if (found := quantisation(folder)) is not None and quantisation_method(folder) not in but:
        by = "" if but else f" (policy.backend=fsdp reads {' and '.join(DEQUANTISED)})"
        raise UnsupportedModelError(
            f"the weights are quantised, which is not read: {found}; take the model's "
            f"publication in bfloat16, or dequantise it{by}"
        )


def raised(check: Callable[[], object]) -> Iterator[str]:
    """Yields the message of a check that raises `UnsupportedModelError`."""
    try:
        check()
    except UnsupportedModelError as error:
        yield str(error)


def adapted_names(
    targets: Sequence[str], fused: Mapping[str, Sequence[str]], model_type: str
) -> tuple[str, ...]:
    """Returns the names of a layer's matrices that have an adapter, as in the model's files.

    Args:
        fused: Matrix of the files -> the targets that it combines; it has one adapter, as in PEFT.

    Raises:
        UnsupportedModelError: `targets` has some parts of a combined matrix and lacks others.
    """
    names = list(targets)
    for name, parts in fused.items():
        chosen = [part for part in parts if part in names]
        if chosen and len(chosen) < len(parts):
            raise UnsupportedModelError(
                f"policy.lora.targets has {', '.join(chosen)}: files of {model_type} have "
                f"{', '.join(parts)} in one matrix, {name}; name all of them or none"
            )
        if chosen:
            names[names.index(chosen[0])] = name
            names = [other for other in names if other not in parts]
    return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLibrary:
    """The package that a backend is built on, if it uses unstable parts of that package.

    Attributes:
        versions: Versions of the package that the backend supports.
        wanted: Version among them to install for the running Python.
    """

    name: str
    versions: tuple[str, ...]
    wanted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The features of a backend beyond training all weights in one process.

    Attributes:
        parallel: The sizes of `policy.parallel` that may be above 1.
        shared_prefixes: Whether it can compute the common prefix of sequences only once.
    """

    parallel: frozenset[str] = frozenset()
    dtypes: tuple[ElementType, ...] = ("float32",)
    optimizers: tuple[OptimizerName, ...] = ("adamw",)
    lora: bool = False
    critic: bool = False
    other_reference: bool = False
    offload: bool = False
    routing_replay: bool = False
    recompute: bool = False
    shared_prefixes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that a run's plan needs, read from its folder.

    Attributes:
        tied: Whether the output layer shares the embedding's weights.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied output layer counts once."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Device memory of the rank that needs most, in bytes.

    Attributes:
        reference: Copy of the starting weights, or another model; 0 without a reference.
        activations: Activations of the micro-batches in flight, including logits.
        exchanged: Copy of the current weights while the starting weights replace them.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    exchanged: int

    @property
    def total(self) -> int:
        """Peak over all moments of a step, in bytes."""
        kept = self.weights + self.gradients + self.optimizer + self.reference
        return kept + max(self.activations, self.exchanged)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of a rank for policy and critic together, in bytes.

    Attributes:
        peak: Device memory at the moment that needs most.
        between: Device memory between the phases of the policy.
        host: Host memory between the phases, for what `policy.offload` moved off the device.
    """

    peak: int
    between: int
    host: int


def rank_memory(
    offload: OffloadConfig, policy: MemoryEstimate, critic: MemoryEstimate | None = None
) -> RankMemory:
    """Returns the device and host memory of a rank under the settings of `policy.offload`."""

    def resting(model: MemoryEstimate) -> int:
        """Returns the bytes that a model keeps on the device while it computes nothing."""
        parameters = 0 if offload.parameters else model.weights + model.gradients
        return parameters + (0 if offload.optimizer else model.optimizer)

    def working(model: MemoryEstimate) -> int:
        """Returns the bytes of a model in its passes or its optimizer step, the larger of both."""
        state = 0 if offload.optimizer else model.optimizer
        exchanged = 0 if offload.reference else model.exchanged
        moments = (state + max(model.activations, exchanged), model.optimizer)
        return model.weights + model.gradients + max(moments)

    models = [policy] if critic is None else [policy, critic]
    between = sum(map(resting, models)) + (0 if offload.reference else policy.reference)
    # Another model as the reference comes beside the policy's weights, before there are gradients.
    is_other = offload.reference and not policy.exchanged
    reference = policy.weights * offload.parameters + policy.reference * is_other
    host = sum(m.weights * offload.parameters + m.optimizer * offload.optimizer for m in models)
    return RankMemory(
        peak=between + max(reference, *(working(model) - resting(model) for model in models)),
        between=between,
        host=host + policy.reference * offload.reference,
    )


class BackendDescription(Protocol):
    """The description of one backend; each `model` argument is a result of its `read_model`."""

    name: ClassVar[BackendName]
    capabilities: ClassVar[Capabilities]
    library: ClassVar[BackendLibrary | None] = None
    """None if the backend's version is that of treadle-policy."""

    @property
    def model_types(self) -> Collection[str]:
        """Each `model_type` of a config.json that it can train, at least with some settings."""
        ...

    @property
    def vision_types(self) -> Collection[str]:
        """The `model_types` whose models read images."""
        ...

    def read_model(self, folder: Path) -> ModelShape:
        """Reads `config.json` of a Hugging Face model folder.

        Raises:
            FileNotFoundError: config.json is missing.
            UnsupportedModelError: The backend does not compute this model.
        """
        ...

    def split_problems(self, model: Any, parallel: ParallelConfig) -> Iterator[str]:
        """Yields each parallel size into which the model cannot be split, and the fix."""
        ...

    def training_problems(self, model: Any, policy: PolicyConfig) -> Iterator[str]:
        """Yields each other setting of the policy that the model does not support, and the fix."""
        ...

    def reference_problems(self, model: Any, reference: Any) -> Iterator[str]:
        """Yields why a reference model cannot score the policy's sequences."""
        ...

    def adapters(self, model: Any, lora: LoraConfig) -> tuple[Sequence[str], int]:
        """Returns a layer's matrices that have an adapter, and the number of adapter parameters.

        Raises:
            UnsupportedModelError: These matrices cannot have adapters.
        """
        ...

    def memory(
        self,
        model: Any,
        policy: PolicyConfig,
        *,
        rows: int,
        reference: bool = False,
        other_reference: Any = None,
    ) -> MemoryEstimate:
        """Estimates the memory of the rank that needs most.

        Args:
            model: A model that the parallel sizes divide.
            rows: Number of tokens of a micro-batch, over all context ranks.
            other_reference: The reference model; None: the reference is the starting weights.
        """
        ...

    def critic_memory(self, model: Any, policy: PolicyConfig, *, rows: int) -> MemoryEstimate:
        """Estimates the memory that the critic needs in addition to `memory`."""
        ...


def refusals(
    backend: BackendDescription,
    policy: PolicyConfig,
    *,
    critic: CriticConfig | None = None,
    other_reference: bool = False,
) -> Iterator[str]:
    """Yields each setting that a backend does not support for any model, and the fix."""
    can, offloaded = backend.capabilities, policy.offload.names
    settings = [
        (f"policy.parallel.{name}", size, name not in can.parallel and size > 1, "1")
        for name, size in policy.parallel
        if name != "sequence"
    ] + [
        ("policy.dtype", policy.dtype, policy.dtype not in can.dtypes, " or ".join(can.dtypes)),
        *(
            (key, name, name not in can.optimizers, "adamw")
            for key, name in (
                ("policy.optimizer.name", policy.optimizer.name),
                ("critic.optimizer.name", critic.optimizer.name if critic else "adamw"),
            )
        ),
        ("policy.lora.rank", policy.lora.rank, policy.lora.rank > 0 and not can.lora, "0"),
        ("policy.offload", ",".join(offloaded), bool(offloaded) and not can.offload, "{}"),
        (
            "policy.recompute",
            policy.recompute,
            policy.recompute != "none" and not can.recompute,
            "none",
        ),
        (
            "policy.share_prefixes",
            policy.share_prefixes,
            policy.share_prefixes == "always" and not can.shared_prefixes,
            "auto",
        ),
        ("algorithm.advantage", "gae", critic is not None and not can.critic, "grpo"),
        (
            "algorithm.reference_path",
            "another model",
            other_reference and not can.other_reference,
            "null",
        ),
    ]
    for name, value, is_refused, fix in settings:
        if is_refused:
            is_of_fsdp = name.endswith(("optimizer.name", "parallel.replicas"))
            other = "fsdp" if is_of_fsdp else "megatron"
            yield (
                f"policy.backend={backend.name} has no {name}={value}: set {name}={fix}, or "
                f"policy.backend={other}"
            )
