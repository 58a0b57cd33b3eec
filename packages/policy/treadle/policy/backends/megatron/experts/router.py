"""Which experts a token goes to: Megatron's router with the arithmetic of Qwen3-MoE.

For the scores s = softmax(W x) over all experts, in float32, a token goes to the K experts with the
largest scores, with weights s_k, divided by their sum if `norm_topk_prob` is true; weights have the
type of the logits. Logits have the type of the model, as in transformers and in vLLM.

Replayed choices: where `Segments.routing.indices_PLK` (see `routing`) names the experts of a row,
they take the place of the K largest. Their weights are the scores at these indices, so that the
router still gets a gradient. To replay, give the segments of a micro-batch the indices:

    segments.routing = Routing(indices_PLK=indices)

P are all packed rows of the micro-batch on this context-parallel rank, padding included; under
sequence parallelism each rank takes its part. L counts all layers of the model, with experts or
not. `plan.prepare` keeps the indices when it completes the routing of a batch.

The load-balancing loss of a micro-batch and a layer is that of Switch Transformers
(arXiv:2101.03961, equations 4 to 6),

    E sum_e f_e p_e,

for E experts, f_e the share of all choices that fell on expert e, and p_e the mean of its scores
over the rows; it is 1 where both are even. Training uses its mean over the rows of the batch, each
micro-batch with the weight `Routing.share`, summed over layers and multiplied by
`policy.moe.aux_loss_coef`. f and p are those of one micro-batch, so the gradient depends on how the
batch is split into micro-batches. Tensor, sequence, expert and pipeline parallelism do not change
it.

Shape suffixes: P rows of this rank, L layers of the model, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.experts.routing import Routing

device.install()

from megatron.core.transformer.moe.moe_utils import (  # noqa: E402
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402


class ExpertRouter(TopKRouter):
    """The router of one layer; the layer sets `told` to the rows of its next computation.

    Attributes:
        load_2E: Per expert, how many times it was chosen and the sum of its scores since the last
            reset, float64. Only passes with a gradient count.
        replay_2: Number of replayed rows, and of their experts that the router would not have
            chosen itself. Counted like `load_2E`.
    """

    def __init__(self, config: Any, *, normalised: bool, **given: Any) -> None:
        """Called by Megatron; `normalised` is from the layer spec.

        Args:
            normalised: Whether the weights of a token's experts add up to 1.
            **given: Arguments that this version of Megatron gives its own router besides.
        """
        super().__init__(config=config, **given)
        self.told = Routing()
        self._normalised = normalised
        self.load_2E = torch.zeros(2, self.num_experts, dtype=torch.float64, device=device.device())
        self.replay_2 = torch.zeros(2, dtype=torch.float64, device=device.device())

    def gating(self, input: Tensor) -> Tensor:
        """Returns the [P, 1, E] logits of [P, 1, H] rows, in their type."""
        return F.linear(input, self.weight)  # Megatron's own names Transformer Engine

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Chooses the experts of each row.

        Args:
            logits: Array of shape [P, 1, E].

        Returns:
            [P, E] weights of the experts, 0 where not chosen, and [P, E] whether they are chosen.
        """
        logits_PE = logits.view(-1, self.num_experts)
        scores_PE = torch.softmax(logits_PE, dim=-1, dtype=torch.float32)
        chosen_PK = self._chosen(scores_PE)
        weights_PK = scores_PE.gather(1, chosen_PK)
        if self._normalised:
            weights_PK = weights_PK / weights_PK.sum(dim=-1, keepdim=True)
        weights_PE = torch.zeros_like(logits_PE).scatter(
            1, chosen_PK, weights_PK.to(logits_PE.dtype)
        )
        chosen_PE = torch.zeros_like(logits_PE, dtype=torch.bool).scatter(1, chosen_PK, True)
        if torch.is_grad_enabled():  # once per step, also where the layer is computed twice
            weights_PE = self._balanced(weights_PE, scores_PE, chosen_PE)
        return weights_PE, chosen_PE

    def _chosen(self, scores_PE: Tensor) -> Tensor:
        own_PK = scores_PE.topk(self.topk, dim=-1).indices
        if self.told.indices_PLK is None:
            return own_PK
        told_PK = self._part(self.told.indices_PLK[:, self.layer_number - 1])
        replayed_P1 = told_PK[:, :1] >= 0
        if torch.is_grad_enabled():
            changed_PK = (told_PK[:, :, None] != own_PK[:, None, :]).all(-1) & replayed_P1
            self.replay_2 += torch.stack([replayed_P1.sum(), changed_PK.sum()])
        return torch.where(replayed_P1, told_PK, own_PK)

    def _balanced(self, weights_PE: Tensor, scores_PE: Tensor, chosen_PE: Tensor) -> Tensor:
        """Notes the load, and returns the weights with the load-balancing loss attached."""
        if self.told.real_P is not None:
            real_P1 = self._part(self.told.real_P)[:, None]
            chosen_PE, scores_PE = chosen_PE & real_P1, scores_PE * real_P1
        with torch.no_grad():
            sums = [x.sum(0, dtype=torch.float64) for x in (chosen_PE, scores_PE)]
            self.load_2E += torch.stack(sums)
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if not coefficient:
            return weights_PE
        counts_E, _, rows = get_tokens_per_expert_and_token_count(
            routing_map=chosen_PE,
            reduce_group=self.tp_cp_group,
            topk=self.topk,
            with_padding_mask=True,
        )
        loss = switch_load_balancing_loss_func(
            probs=scores_PE,
            tokens_per_expert=counts_E,
            total_num_tokens=rows.clamp(min=1),  # a micro-batch may be all padding
            topk=self.topk,
            num_experts=self.num_experts,
            moe_aux_loss_coeff=coefficient,
        )
        attached: Tensor = MoEAuxLossAutoScaler.apply(weights_PE, loss * self.told.share)
        return attached

    def _part(self, x_P: Tensor) -> Tensor:
        """Returns the rows of this rank under sequence parallelism."""
        if not self.config.sequence_parallel:
            return x_P
        part: Tensor = x_P.chunk(self.tp_group.size())[self.tp_group.rank()]
        return part
