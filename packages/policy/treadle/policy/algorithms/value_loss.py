"""The critic's loss: how far its values are from the returns.

Shape suffix: T tokens that are trained on.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["value_loss"]


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each token, and 1.0 where clipping raised it.

    The loss is max((V - R)^2, (V_clipped - R)^2) / 2, with V_clipped the value within `clip` of
    V_old, the value before the batch. That is the clipped value loss of PPO's first implementation
    (openai/baselines, ppo2) and of verl's `compute_value_loss`: the greater of two errors, so that
    a value which has moved too far has no gradient to go on.

    Args:
        values_T: Values of the critic that is trained; they carry the gradient.
        old_values_T: Values of the critic before the batch.
        clip: How far a value may move in a batch, in units of the reward; None: any distance.
    """
    error_T = (values_T - returns_T) ** 2
    if clip is None:
        return 0.5 * error_T, torch.zeros_like(error_T)
    clipped_T = torch.clamp(values_T, old_values_T - clip, old_values_T + clip)
    of_clipped_T = (clipped_T - returns_T) ** 2
    return 0.5 * torch.maximum(error_T, of_clipped_T), (of_clipped_T > error_T).float()
