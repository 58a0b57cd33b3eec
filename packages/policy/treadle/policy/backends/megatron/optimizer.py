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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.policy.backends.megatron import device

device.install()

from megatron.core.optimizer import OptimizerConfig as MegatronConfig  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # noqa: E402

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
        for state in self.adam_state.values():
            state["step"] = torch.tensor(float(steps))

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
        optimizer = self.megatron
        overflowed = optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if overflowed or not math.isfinite(norm):
            return norm, False
        for part in self.parts:
            clip_grad_by_total_norm_fp32(
                part.get_parameters(), max_norm=settings.grad_clip, total_norm=norm
            )
        optimizer.step_with_ready_grads()
        return norm, True

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
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            yield from part.optimizer.param_groups
