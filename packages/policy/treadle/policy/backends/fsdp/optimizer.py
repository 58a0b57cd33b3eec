"""The optimizer of this rank's share of the parameters, which are float32.

It is AdamW. With `policy.optimizer.name` another than that, matrices of layers have another step,
and their state is not Adam's in float32; embeddings, output layer, norms and biases keep AdamW.

Invariants: a step with a non-finite gradient changes nothing. The norm is that of the whole model's
gradient, the same on every rank, so every rank makes the same decision. What a step computes of a
parameter, and the parts of its state, do not depend on how ranks share it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from treadle.policy.backends.fsdp.description import NO_8BIT
from treadle.policy.backends.fsdp.sharding import copies
from treadle.policy.backends.ranks import device

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from treadle.policy.backends.fsdp.net import Net
    from treadle.policy.config.policy import AdamSettings, OptimizerConfig

BLOCK: Final = 256
"""Numbers that share a scale in bitsandbytes' optimizers."""


class Optimizer:
    """The optimizer of the trained parameters of a module that is sharded already."""

    def __init__(self, net: Net, settings: OptimizerConfig) -> None:
        """Makes the state, which torch would make in the first step: a checkpoint may be before.

        Raises:
            ValueError: A package is not installed.
        """
        self._parameters = {n: p for n, p in net.named_parameters() if p.requires_grad}
        self._name, self._momentum = settings.name, settings.momentum
        # Of DTensors each operation would be dispatched anew; their shards are plain tensors.
        self.shards = {name: shard(p) for name, p in self._parameters.items()}
        self._state: dict[str, dict[str, Tensor]] = {}
        if settings.name == "muon":
            for name in _matrices(net):
                self._state[name] = {"momentum": torch.zeros_like(self.shards[name])}
        elif settings.name == "adamw8bit":
            self._quantised = _bitsandbytes()
            for name, parameter in _matrices(net).items():
                if math.prod(parameter.shape[1:]) % BLOCK == 0:
                    self._state[name] = _quantised_state(self.shards[name])
        self._others = tuple(self._state)
        of_adam = {n: p for n, p in self._parameters.items() if n not in self._state}
        matrices = [self.shards[name] for name, p in of_adam.items() if p.dim() > 1]
        vectors = [self.shards[name] for name, p in of_adam.items() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": part, "decayed": decayed}
            for part, decayed in ((matrices, True), (vectors, False))
            if part
        ]
        self._adam: torch.optim.AdamW | None = None
        if groups:
            self._adam = torch.optim.AdamW(
                groups,
                lr=settings.lr,
                betas=(settings.beta1, settings.beta2),
                eps=settings.eps,
                fused=True,
            )
            for name in of_adam:
                own = self.shards[name]
                state = self._adam.state[own]
                state["step"] = torch.tensor(0.0, device=own.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(own), torch.zeros_like(own)
                self._state[name] = state

    @torch.no_grad()
    def reset(self) -> None:
        """See `ModelOptimizer.reset`."""
        for name, state in self._state.items():
            begin = _quantised_state(self.shards[name]) if "codes" in state else {}
            for kind, tensor in state.items():
                tensor.copy_(begin.get(kind, torch.zeros_like(tensor)))

    def zero_grad(self) -> None:
        """Forgets the gradient."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def apply(self, settings: AdamSettings) -> tuple[float, bool]:
        """See `ModelOptimizer.apply`; forgets the gradient."""
        of_copies: dict[int, list[Tensor]] = {}
        for name, own in self.shards.items():
            gradient = self._parameters[name].grad
            own.grad = None if gradient is None else shard(gradient)
            if own.grad is not None:
                of_copies.setdefault(copies(self._parameters[name]), []).append(own.grad)
        squared = torch.zeros((), dtype=torch.float64, device=device())
        for count, alike in of_copies.items():
            norms = torch.stack(torch._foreach_norm(alike)).to(torch.float64)
            squared += norms.square().sum() / count
        dist.all_reduce(squared)
        of_all = float(squared)  # the one place of a step where the host waits
        norm = math.sqrt(of_all) if math.isfinite(of_all) else math.inf
        applied = math.isfinite(norm)
        if applied:
            if norm > settings.grad_clip:
                gradients = [gradient for alike in of_copies.values() for gradient in alike]
                torch._foreach_mul_(gradients, settings.grad_clip / (norm + 1e-6))
            if self._adam is not None:
                for group in self._adam.param_groups:
                    group["lr"], group["eps"] = settings.lr, settings.eps
                    group["betas"] = settings.beta1, settings.beta2
                    group["weight_decay"] = settings.weight_decay if group["decayed"] else 0.0
                self._adam.step()
            step = self._step_muon if self._name == "muon" else self._step_quantised
            for name in self._others:
                if self.shards[name].grad is not None:
                    step(name, settings)
        self.zero_grad()
        for own in self.shards.values():
            own.grad = None
        return norm, applied

    def _step_muon(self, name: str, settings: AdamSettings) -> None:
        """Takes a step of Muon, whose learning rate is on the scale of AdamW's; collective."""
        own, momentum = self.shards[name], self._state[name]["momentum"]
        assert own.grad is not None
        momentum.lerp_(own.grad, 1 - self._momentum)
        like = self._parameters[name]
        ahead = _whole(own.grad.lerp(momentum, self._momentum), like)  # Nesterov's
        move = orthogonal(ahead.full_tensor() if isinstance(ahead, DTensor) else ahead)
        if isinstance(like, DTensor):
            part = distribute_tensor(move, like.device_mesh, like.placements, src_data_rank=None)
            move = part.to_local()
        own.mul_(1 - settings.lr * settings.weight_decay).add_(move, alpha=settings.lr)

    def _step_quantised(self, name: str, settings: AdamSettings) -> None:
        """Takes a step of AdamW whose moments have 8 bits; they are quantised again after it."""
        own, state = self.shards[name], self._state[name]
        state["step"] += 1
        if not own.numel():
            return  # there are more ranks than rows
        maps = (self._quantised.create_dynamic_map(signed=signed) for signed in (True, False))
        self._quantised.optimizer_update_8bit_blockwise(
            "adam",
            own.grad,
            own,
            state["codes"],
            state["codes_sq"],
            settings.beta1,
            settings.beta2,
            0.0,
            0.0,
            settings.eps,
            int(state["step"]),
            settings.lr,
            *(codes.to(own.device) for codes in maps),
            state["scales"].view(-1),
            state["scales_sq"].view(-1),
            weight_decay=settings.weight_decay,
        )

    def tensors(self) -> Iterator[Tensor]:
        """Yields the state; counters of steps are numbers, and always on the host."""
        for state in self._state.values():
            yield from (tensor for tensor in state.values() if tensor.dim())

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the state as tensors by name: parameters' parts as DTensors, where they are."""
        for name, parameter in self._parameters.items():
            for kind, tensor in self._state[name].items():
                yield f"{kind}.{name}", _whole(tensor, parameter) if tensor.dim() else tensor


def shard(tensor: Tensor) -> Tensor:
    """Returns this rank's part, in the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _whole(own: Tensor, like: Tensor) -> Tensor:
    """Returns a part as the whole that it is of: its rows are sharded as a parameter's are."""
    if not isinstance(like, DTensor):
        return own
    is_alike = own.shape == like.to_local().shape
    shape = like.shape if is_alike else torch.Size((like.shape[0], *own.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, like.device_mesh, like.placements, shape=shape, stride=stride)


def _matrices(net: Net) -> Mapping[str, nn.Parameter]:
    """Returns the trained matrices of layers, and experts, which have theirs in one tensor."""
    inside = {id(p) for layer in net.layers() for p in layer.parameters()}
    return {
        name: p
        for name, p in net.named_parameters()
        if p.requires_grad
        and id(p) in inside
        and (p.dim() == 2 or (p.dim() == 3 and "experts" in name))
    }


def orthogonal(update: Tensor) -> Tensor:
    """Returns the step of Muon along an update, a matrix or several, for a learning rate of 1."""
    move = torch.zeros_like(update)
    parts = [(move, update)] if update.dim() == 2 else list(zip(move, update, strict=True))
    for part, matrix in parts:
        part.grad = matrix
    torch.optim.Muon(
        [part for part, _ in parts],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,  # which is in the update
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    ).step()
    return move


def _quantised_state(own: Tensor) -> dict[str, Tensor]:
    scales = torch.zeros(len(own), math.prod(own.shape[1:]) // BLOCK, device=own.device)
    state = {"step": torch.tensor(0.0)}
    for kind in ("", "_sq"):
        state[f"codes{kind}"] = torch.zeros_like(own, dtype=torch.uint8)
        state[f"scales{kind}"] = scales.clone()
    return state


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ValueError(NO_8BIT) from error
    return bitsandbytes.functional
