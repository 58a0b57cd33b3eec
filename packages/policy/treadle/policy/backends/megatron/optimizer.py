"""The optimizer: AdamW on one rank's share of the parameters.

Invariant: a step with a non-finite gradient changes nothing. The norm is taken over the whole
model's gradient and reduced over all ranks, so every rank makes the same decision.

Where several ranks have the same weights, data-parallel or context ranks, this is Megatron's
distributed optimizer, which keeps the state of each parameter on one of them; otherwise its plain
one, which checkpoints much faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.policy.backends.megatron import device

device.install()

from megatron.core.optimizer import OptimizerConfig as MegatronConfig  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from treadle.policy.config.policy import AdamSettings, PolicyConfig


class PolicyOptimizer:
    """AdamW over a Megatron DDP module. Build it after the weights are loaded: it copies them."""

    def __init__(self, net: DistributedDataParallel, config: PolicyConfig) -> None:
        """Creates the optimizer and its state for the parameters of `net`; collective."""
        settings = config.optimizer
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.distributed = bool(net.ddp_config.use_distributed_optimizer)
        self.megatron = get_megatron_optimizer(
            MegatronConfig(
                optimizer="adam",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                clip_grad=settings.grad_clip,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=self.distributed,
            ),
            [net],
            use_gloo_process_groups=False,
        )
        self.fused = device.device().type == "cuda"
        """Whether Adam's step is one kernel, which differs from torch's other one by rounding."""
        self._start_adam()

    @property
    def parts(self) -> Sequence[Any]:
        """Megatron's optimizers: of all parameters; or of experts that ranks share, and the rest.

        Those parameters have other data-parallel ranks.
        """
        parts: list[Any] = self.megatron.chained_optimizers
        return parts

    @property
    def adam_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Adam's state of each tensor that it updates."""
        return {
            tensor: state for part in self.parts for tensor, state in part.optimizer.state.items()
        }

    @property
    def adam_steps(self) -> int:
        """Updates that Adam's bias correction counts; skipped steps are not among them."""
        return next((int(s["step"]) for s in self.adam_state.values()), 0)

    @adam_steps.setter
    def adam_steps(self, steps: int) -> None:
        for tensor, state in self.adam_state.items():
            state["step"] = self._counter(float(steps), tensor)

    @torch.no_grad()
    def apply(self, settings: AdamSettings) -> tuple[float, bool]:
        """Updates the parameters with the gradient that backward left behind, clipped.

        Returns:
            The norm of the whole model's gradient before clipping, and whether it was applied.
        """
        for group in self._groups():
            group["lr"], group["eps"] = settings.lr, settings.eps
            group["betas"] = settings.beta1, settings.beta2
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
            group["fused"] = self.fused
        overflowed = self.megatron.prepare_grads()
        norm = self._gradient_norm()
        if overflowed or not math.isfinite(norm):
            return norm, False
        if (factor := settings.grad_clip / (norm + 1e-6)) < 1.0:
            tensors = chain.from_iterable(part.get_parameters() for part in self.parts)
            if gradients := [tensor.grad for tensor in tensors if tensor.grad is not None]:
                torch._foreach_mul_(gradients, factor)
        self.megatron.step_with_ready_grads()
        return norm, True

    def _gradient_norm(self) -> float:
        """Returns the norm over all ranks; the one place of a step where the host waits."""
        gradients = [part.get_main_grads_for_grad_norm() for part in self.parts]
        groups = [part.get_grad_stats_parallel_group() for part in self.parts]
        if all(group == groups[0] for group in groups):
            gradients, groups = [list(chain.from_iterable(gradients))], groups[:1]
        squares = []
        for own, group in zip(gradients, groups, strict=True):
            square = torch.zeros(1, device=device.device())
            if own:
                square += torch.stack(torch._foreach_norm(own)).norm() ** 2
            dist.all_reduce(square, group=group)
            squares.append(square)
        norms = [square**0.5 for square in torch.cat(squares).tolist()]
        return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))

    def tensors(self) -> Iterator[Tensor]:
        """Yields what Adam updates and its moments; some may be views of the model's parameters.

        Adam's counters of steps are not among them: they are numbers, and always on the host.
        """
        for group in self._groups():
            yield from group["params"]
        for state in self.adam_state.values():
            yield from (value for value in state.values() if value.dim())

    @torch.no_grad()
    def reset(self) -> None:
        """Begins again with Adam's state."""
        for state in self.adam_state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
        self.adam_steps = 0

    def zero_grad(self) -> None:
        """Forgets the gradients of the last step."""
        self.megatron.zero_grad()

    def _start_adam(self) -> None:
        """Creates Adam's state, which torch would create in the first step.

        A checkpoint may be written or read before there is a first step.
        """
        for part in self.parts:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state: dict[str, Any] = part.optimizer.state[parameter]
                    state["step"] = self._counter(0.0, parameter)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _counter(self, steps: float, like: Tensor) -> Tensor:
        """Returns Adam's counter of a tensor, which a fused step reads on its device."""
        return torch.tensor(steps, device=like.device if self.fused else "cpu")

    def _groups(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            yield from part.optimizer.param_groups
