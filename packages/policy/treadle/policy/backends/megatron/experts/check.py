"""Refuses what a policy with experts cannot do, before it is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.megatron.experts.shape import ExpertShape
    from treadle.policy.config.policy import ParallelConfig, PolicyConfig

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


def split_problems(shape: ExpertShape | None, parallel: ParallelConfig) -> Iterator[str]:
    """Yields each parallel size into which the experts cannot be split, and the fix."""
    if shape is None:
        return
    if shape.number % parallel.expert:
        yield (
            f"policy.parallel.expert={parallel.expert} does not divide the model's {shape.number} "
            "experts: take a size that does"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"policy.parallel.tensor={parallel.tensor} needs policy.parallel.sequence=true for a "
            "model with experts, as each row is routed on one rank only: set it"
        )


def training_problems(architecture: Architecture, policy: PolicyConfig) -> Iterator[str]:
    """Yields each other setting that does not fit the policy's experts or their absence."""
    if architecture.experts is None:
        for setting, value, off in (
            ("policy.parallel.expert", policy.parallel.expert, 1),
            ("policy.moe.aux_loss_coef", policy.moe.aux_loss_coef, 0),
            ("policy.moe.routing_replay", policy.moe.routing_replay, False),
        ):
            if value > off:
                yield (
                    f"{setting}={str(value).lower()} needs a model with experts, but "
                    f"{architecture.model_type} has none here: set it to {str(off).lower()}"
                )
    elif policy.lora.rank and (refused := [t for t in policy.lora.targets if t not in _ATTENTION]):
        yield (
            f"policy.lora.targets has {', '.join(refused)}, but experts take no adapters: set it "
            f"to matrices of the attention, [{','.join(_ATTENTION)}]"
        )
