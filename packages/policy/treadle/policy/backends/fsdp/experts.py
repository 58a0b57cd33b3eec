"""Experts that ranks share: each rank has some of a layer's experts, whole, and tokens go to them.

It is behind transformers' interface of experts, as attention is behind that of attention. A rank
sends the rows of its tokens to the ranks of their experts, computes what it has received as
transformers does (grouped matrix products), and gets its own rows back: no token is dropped.

Shape suffixes: N positions, K experts of each, H hidden, S pairs of a position and an expert, R
rows that this rank computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.fsdp.exchange import exchanged
from treadle.policy.backends.ranks import device

if TYPE_CHECKING:
    from treadle.policy.config.policy import ParallelConfig

NAME: Final = "treadle_spread"
"""What a model's `experts_implementation` is for this."""


def spread(model: nn.Module, parallel: ParallelConfig, precision: MixedPrecisionPolicy) -> None:
    """Leaves this rank its share of the experts, which FSDP shards over those with the same.

    Args:
        parallel: Has the number of ranks that share the experts of a layer, which are neighbours.
        precision: Precision of the other parameters.

    Raises:
        UnsupportedModelError: They cannot be shared.
    """
    count, replicas = parallel.expert, parallel.replicas
    shape = (replicas, dist.get_world_size() // replicas // count, count)
    names = ("replicas", "copies", "experts")
    first = int(replicas == 1)
    mesh = init_device_mesh(device().type, shape[first:], mesh_dim_names=names[first:])
    # The weights of a row stay float32, as within a layer that is sharded as a whole.
    own = MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=False,
    )
    found = list(_modules(model))
    for experts in found:
        named = list(experts.named_parameters(recurse=False))
        if len(named) < len(list(experts.parameters())) or any(
            len(parameter) != experts.num_experts for _, parameter in named
        ):
            found.clear()
            break
        for name, parameter in named:
            part = distribute_tensor(parameter, mesh["experts"], [Shard(0)], src_data_rank=None)
            kept = nn.Parameter(part, requires_grad=parameter.requires_grad)
            experts.register_parameter(name, kept)
        fully_shard(experts, mesh=mesh[names[first:-1]], mp_policy=own)
        experts.config._experts_implementation = NAME
    if not found:
        raise UnsupportedModelError(
            f"policy.parallel.expert={count}: ranks cannot share the experts of this model; set it "
            "to 1"
        )


def _modules(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "_is_expert_parallel"))


class _Own:
    """A module of experts as this rank has it: fewer experts, and plain tensors."""

    def __init__(self, experts: Any, ranks: int) -> None:
        self._experts, self._ranks = experts, ranks
        self.num_experts: int = experts.num_experts // ranks

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._experts, name)
        if not isinstance(found, DTensor):
            return found
        own = found.to_local()
        if own.requires_grad:
            # It is of the tokens of all ranks, of which FSDP takes the mean of those with the same.
            own.register_hook(lambda gradient: gradient / self._ranks)
        return own


def _compute(experts: Any, rows_NH: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Computes experts, as `ALL_EXPERTS_FUNCTIONS` of transformers call it; collective."""
    one: DTensor = next(experts.parameters())
    group = one.device_mesh.get_group()
    ranks = group.size()
    own: Any = _Own(experts, ranks)
    experts_S, order_S = experts_NK.flatten().sort(stable=True)
    to_send = torch.bincount(experts_S // own.num_experts, minlength=ranks)
    to_receive = exchanged(to_send, group)
    sent, received = to_send.tolist(), to_receive.tolist()
    own_R = exchanged(experts_S % own.num_experts, group, sent, received)
    rows_RH = exchanged(rows_NH[order_S // experts_NK.shape[1]], group, sent, received)
    ones_R1 = rows_RH.new_ones(len(rows_RH), 1)
    computed_RH = grouped_mm_experts_forward(own, rows_RH, own_R[:, None], ones_R1)
    back_SH = exchanged(computed_RH, group, received, sent)[order_S.argsort()]
    weighted_SH = back_SH * weights_NK.reshape(-1, 1)
    return weighted_SH.view(*experts_NK.shape, -1).sum(1).to(rows_NH.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, _compute)
