"""How ranks share the parameters of a model: torch's FSDP2 over a mesh of ranks.

Invariant: ranks that hold the same part of a parameter give it the same gradient, so that it stays
the same on each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from treadle.policy.backends.fsdp import experts
from treadle.policy.backends.ranks import device

if TYPE_CHECKING:
    from treadle.policy.backends.fsdp.net import Net
    from treadle.policy.config.policy import ParallelConfig, PolicyConfig


def spread(net: Net, config: PolicyConfig) -> Net:
    """Keeps this rank's share of a model, which each rank has whole."""
    if config.recompute == "full":
        net.recompute()
    for layer in net.layers():
        layer.register_forward_hook(_reach_all)  # before FSDP's, which frees the parameters
    half = config.dtype != "float32"
    if dist.get_world_size() > 1 or half:
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32
        )
        mesh = _joined(net, config.parallel)
        if config.parallel.expert > 1:
            experts.spread(net, config.parallel, precision)
        for layer in net.layers():
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(net, mesh=mesh, mp_policy=precision)
    elif config.offload.names:  # memory that the file is mapped into would have to stay
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()
    return net.to(device())


def _joined(net: Net, parallel: ParallelConfig) -> DeviceMesh:
    """Returns the ranks that FSDP shards over, between which matrices are split already."""
    replicas, tensor = parallel.replicas, parallel.tensor
    shards = dist.get_world_size() // replicas // tensor
    sizes = {"replicas": replicas, "shards": shards, "tensor": tensor}
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shards")
    shape = tuple(sizes[name] for name in names)
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=names)
    if tensor == 1:
        return mesh
    _split(net.model, mesh["tensor"])
    return mesh[names[:-1]]


def _split(model: Any, mesh: DeviceMesh) -> None:
    """Splits matrices between ranks by transformers' own plan of the model."""
    head = model.get_output_embeddings()
    if head is not None:  # else the plan would be for what it is tied to, too
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=head.weight.requires_grad)
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
    model.tie_weights()


def copies(parameter: Tensor) -> int:
    """Returns how many ranks hold the same part of a parameter as this one, itself included."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh, placements = parameter.device_mesh, parameter.placements
    parts = (mesh.size(i) for i, placed in enumerate(placements) if not placed.is_replicate())
    return dist.get_world_size() // math.prod(parts)


def _reach_all(layer: nn.Module, _: Any, output: Any) -> Any:
    """Returns the output of a layer, from which a gradient reaches all its parameters."""
    # Experts that ranks share have their own part of FSDP, and always a gradient.
    trained = [p for p in layer.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if not (torch.is_grad_enabled() and trained):
        return output
    if isinstance(output, Tensor):
        return reach(output, trained)
    return (reach(output[0], trained), *output[1:])


def reach(output: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Returns an output from which a gradient, of zeros at least, reaches all of these."""
    reached: Tensor = _ReachAll.apply(output, *parameters)  # type: ignore[no-untyped-call]
    return reached


class _ReachAll(torch.autograd.Function):
    """Gives a gradient of zeros to parameters that the output does not depend on.

    FSDP reduces the parameters that have a gradient, so ranks must agree on which these are. They
    do not by themselves: DeepSeek V4 compresses keys only in sequences above a length.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        """Returns a copy of the output: of a view FSDP warns that it may be changed in place."""
        ctx.shapes = [p.shape for p in parameters]
        ctx.dtypes = [p.dtype for p in parameters]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Returns the output's gradient, and zeros without memory of their own."""
        (of_output,) = gradients
        zeros = (
            of_output.new_zeros((), dtype=dtype).expand(shape)
            for shape, dtype in zip(ctx.shapes, ctx.dtypes, strict=True)
        )
        return (of_output, *zeros)
