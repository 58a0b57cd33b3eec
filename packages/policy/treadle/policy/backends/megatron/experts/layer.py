"""A decoder layer with experts: Megatron's own, on the local layer spec.

Experts are computed one after another (`SequentialMLP`), as Megatron's grouped ones need further
CUDA libraries; tokens travel between the ranks that share experts by its `alltoall` dispatcher.
Neither drops a token. An expert is whole on its rank: tensor-parallel ranks, each of which routes
its rows of the sequence, share experts as data-parallel ranks do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.experts.router import ExpertRouter
from treadle.policy.backends.megatron.experts.routing import Routing

device.install()

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.experts.shape import ExpertShape
    from treadle.policy.backends.megatron.parallel import World
    from treadle.policy.config.policy import PolicyConfig


class ExpertLayer(TransformerLayer):
    """A layer that gives its router the rows before each computation.

    Megatron may compute a layer, or its feed-forward part, again in the backward pass, after the
    forward passes of other micro-batches.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called by Megatron; hands the micro-batch's routing on as the padding mask."""
        return super().forward(
            *args, **kwargs | {"padding_mask": kwargs["packed_seq_params"].routing}
        )

    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context: None = None,
        *,
        padding_mask: Routing,
        **_: Any,
    ) -> Tensor:
        def experts(normed: Tensor) -> Any:
            self.mlp.router.told = padding_mask
            return self.mlp(normed)

        normed = self._forward_pre_mlp_layernorm(hidden_states)
        if (
            self.config.recompute_granularity == "selective"
            and "mlp" in self.config.recompute_modules
        ):
            output = tensor_parallel.checkpoint(experts, False, normed)
        else:
            output = experts(normed)
        out: Tensor = self._forward_post_mlp(output, hidden_states)
        return out


def mlp_submodules(layer: Any) -> Any:
    """Returns the parts of a layer spec's feed-forward part, to be changed.

    Megatron-core 0.16.1 describes that part by a `ModuleSpec`, 0.19.2 by a `functools.partial`.
    """
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def layer_spec(shape: ExpertShape, *, qk_norm: bool) -> Any:
    """Returns Megatron's local layer spec with experts."""
    spec = get_gpt_layer_local_spec(
        num_experts=shape.number, qk_layernorm=qk_norm, normalization="RMSNorm"
    )
    spec.module = ExpertLayer
    mlp_submodules(spec).router = partial(ExpertRouter, normalised=shape.normalised)
    return spec


def mark_experts(model: torch.nn.Module) -> None:
    """Marks the experts' parameters, whose copies Megatron then finds by its expert groups.

    Without expert parallelism Megatron takes an expert's copies to be those of every other
    parameter, but the tensor-parallel ranks have copies too.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron's name


def settings(
    shape: ExpertShape | None, config: PolicyConfig, world: World, num_layers: int
) -> dict[str, Any]:
    """Returns Megatron's settings of a model with experts; empty without."""
    if shape is None:
        return {}
    return {
        "num_moe_experts": shape.number,
        "moe_router_topk": shape.per_token,
        "moe_ffn_hidden_size": shape.ffn_size,
        # Megatron demands it for a single expert per token; ours takes the softmax first anyway.
        "moe_router_pre_softmax": True,
        "moe_aux_loss_coeff": config.moe.aux_loss_coef,
        "expert_model_parallel_size": world.expert,
        "expert_tensor_parallel_size": 1,
        # A list says that layers differ: a checkpoint then names each layer.
        "moe_layer_freq": 1
        if len(shape.layers) == num_layers
        else [int(layer in shape.layers) for layer in range(num_layers)],
    }
