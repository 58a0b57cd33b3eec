"""How evenly the tokens of a step went to the experts.

Invariant: the metrics are of the whole batch, each computed row once, so no cut into micro-batches
and no parallel size changes them.

Shape suffixes: L layers of the model, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.experts.router import ExpertRouter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.megatron.model import PolicyModel


def reset(model: PolicyModel) -> None:
    """Begins a step."""
    for router in _routers(model):
        router.load_2E.zero_()
        router.replay_2.zero_()


def metrics(
    model: PolicyModel, architecture: Architecture, *, replaying: bool = False
) -> Mapping[str, float]:
    """Returns means over the layers with experts; collective. Empty for a dense model.

    - moe/load_balance_loss: E sum_e f_e p_e of the whole batch, see `router`; 1 is even.
    - moe/max_load: choices of the expert with the most, over the mean of all experts; 1 is even.
    - moe/replayed_rows: share of the rows that went to the experts of the rollout engine. Only, as
      the next one, if the model is `replaying`.
    - moe/replay_changed: share of those experts that the policy would not have chosen itself.
    """
    shape = architecture.experts
    if shape is None:
        return {}
    sums_L2E = torch.zeros(
        architecture.num_layers, 2, shape.number, dtype=torch.float64, device=device.device()
    )
    replay_2 = torch.zeros(2, dtype=torch.float64, device=device.device())
    for router in _routers(model):
        replay_2 += router.replay_2
        sums_L2E[router.layer_number - 1] = router.load_2E
    dist.all_reduce(sums_L2E)
    dist.all_reduce(replay_2)
    counts_LE, scores_LE = sums_L2E[list(shape.layers)].unbind(1)
    choices_L1, rows_L1 = counts_LE.sum(1, keepdim=True), scores_LE.sum(1, keepdim=True)
    if not choices_L1.all():
        return {}
    replayed = {}
    if replaying:
        rows, changed = replay_2.tolist()
        replayed = {
            "moe/replayed_rows": rows * shape.per_token / float(choices_L1.sum()),
            "moe/replay_changed": changed / max(1.0, rows * shape.per_token),
        }
    f_LE, p_LE = counts_LE / choices_L1, scores_LE / rows_L1
    return {
        "moe/load_balance_loss": shape.number * float((f_LE * p_LE).sum(1).mean()),
        "moe/max_load": shape.number * float(f_LE.amax(1).mean()),
        **replayed,
    }


def _routers(model: PolicyModel) -> Iterator[ExpertRouter]:
    return (module for module in model.modules() if isinstance(module, ExpertRouter))
