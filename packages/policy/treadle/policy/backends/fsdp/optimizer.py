"""The optimizer: AdamW on this rank's share of the parameters, which are float32.

Invariant: a step with a non-finite gradient changes nothing. The norm is that of the whole model's
gradient, the same on every rank, so every rank makes the same decision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from treadle.policy.config.policy import AdamSettings, OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW over the trained parameters of a module that is sharded already."""

    def __init__(self, net: nn.Module, settings: OptimizerConfig) -> None:
        """Makes the state, which torch would make in the first step: a checkpoint may be before."""
        self._parameters = {n: p for n, p in net.named_parameters() if p.requires_grad}
        # Of DTensors each operation would be dispatched anew; their shards are plain tensors.
        self.shards = {name: shard(p) for name, p in self._parameters.items()}
        matrices = [self.shards[name] for name, p in self._parameters.items() if p.dim() > 1]
        others = [self.shards[name] for name, p in self._parameters.items() if p.dim() < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": part, "decayed": decayed}
                for part, decayed in ((matrices, True), (others, False))
                if part
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        for own in self.shards.values():
            state = self._adam.state[own]
            state["step"] = torch.tensor(0.0, device=own.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(own)

    def reset(self) -> None:
        """Begins again with the state."""
        for own in self.shards.values():
            for value in self._adam.state[own].values():
                value.zero_()

    def zero_grad(self) -> None:
        """Forgets the gradient."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def apply(self, settings: AdamSettings) -> tuple[float, bool]:
        """Clips the gradient, updates the parameters with it, and forgets it; collective.

        Returns:
            The norm before clipping, of the whole model, and whether the step was skipped.
        """
        gradients = []
        for name, own in self.shards.items():
            gradient = self._parameters[name].grad
            own.grad = None if gradient is None else shard(gradient)
            if own.grad is not None:
                gradients.append(own.grad)
        squared = torch.zeros((), dtype=torch.float64)
        if gradients:
            norms = torch._foreach_norm(gradients)
            squared = torch.stack(norms).to(torch.float64).square().sum()
        dist.all_reduce(squared)
        norm = math.sqrt(squared) if math.isfinite(squared) else math.inf
        skipped = not math.isfinite(norm)
        if not skipped:
            if norm > settings.grad_clip:
                torch._foreach_mul_(gradients, settings.grad_clip / (norm + 1e-6))
            for group in self._adam.param_groups:
                group["lr"], group["eps"] = settings.lr, settings.eps
                group["betas"] = settings.beta1, settings.beta2
                group["weight_decay"] = settings.weight_decay if group["decayed"] else 0.0
            self._adam.step()
        self.zero_grad()
        for own in self.shards.values():
            own.grad = None
        return norm, skipped

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the state as tensors by name: parameters' parts as DTensors, where they are."""
        for name, parameter in self._parameters.items():
            state = self._adam.state[self.shards[name]]
            yield f"step.{name}", state["step"]
            for moment in MOMENTS:
                yield f"{moment}.{name}", _whole(state[moment], parameter)


def shard(tensor: Tensor) -> Tensor:
    """Returns this rank's part, in the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _whole(own: Tensor, like: Tensor) -> Tensor:
    """Returns a part as the whole that it is of: sharded as a parameter is."""
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(
        own, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
