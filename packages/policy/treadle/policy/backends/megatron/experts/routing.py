"""The description of a micro-batch's rows for the routers, and the experts to replay (R3).

Routers of the engine and of the policy compute the same scores up to rounding, and where two scores
are close they choose other experts: then the policy's log-probabilities are those of another
function than the one that sampled (arXiv:2510.11370). Replayed, both compute the same one.

It travels with the micro-batch, as the field `routing` of its `Segments`. A layer that is computed
again in the backward pass gets the same value, however many micro-batches are under way.

Megatron-core's `RouterReplay` (alike in 0.16.1 and 0.19.2) is not used. Its targets and its mode
are global to the process: a pipeline schedule must exchange them between every forward and backward
pass, and a layer that is computed again takes its target from a queue, which passes without a
gradient fill too. It has no rows that choose for themselves, such as padding, blank micro-batches
and ids without a report. It would replace ten lines of `ExpertRouter`.

Shape suffixes: P packed rows, L layers of the whole model, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.agent_loop import RoutedExperts
    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.megatron.experts.shape import ExpertShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rows of one micro-batch, for the routers of all layers.

    Attributes:
        num_rows: Rows that are no padding, over all context ranks.
        real_P: False for rows that are padding: they are left out of statistics and of the
            load-balancing loss. None: there are none.
        share: The micro-batch's real rows over those of the whole batch, which is the weight of its
            load-balancing loss.
        indices_PLK: The experts that each row goes to in each layer, integers, distinct and below
            the number of experts; the layer decides the weights. A row whose first index in a layer
            is negative chooses in that layer itself, and layers without experts are not read. None:
            all rows choose. See `router`.
    """

    num_rows: int = 0
    real_P: Tensor | None = None
    share: float = 0.0
    indices_PLK: Tensor | None = None


def replayed_indices(
    rows: Sequence[tuple[RoutedExperts | None, range]],
    architecture: Architecture,
    *,
    padding: int = 0,
) -> Tensor | None:
    """Returns the experts of packed rows, [P, L, K] of int16; -1 where none are known.

    Args:
        rows: Known experts of each sequence, and the positions of the rows that it brings.
        padding: Number of rows at the end that belong to no sequence.

    Returns:
        None if nothing is replayed.

    Raises:
        ValueError: The experts are those of another model.
    """
    shape = architecture.experts
    if shape is None or all(experts is None for experts, _ in rows):
        return None
    num_rows = sum(len(positions) for _, positions in rows) + padding
    indices_PLK = np.full((num_rows, architecture.num_layers, shape.per_token), -1, np.int16)
    # A slice, where possible: numpy takes a hundred times as long for a list.
    layers = slice(None) if len(shape.layers) == architecture.num_layers else list(shape.layers)
    first = 0
    for experts, positions in rows:
        if experts is not None:
            known = _ids(experts, shape)[positions.start : positions.stop]
            indices_PLK[first : first + len(known), layers] = known
        first += len(positions)
    return torch.from_numpy(indices_PLK)


def _ids(experts: RoutedExperts, shape: ExpertShape) -> NDArray[np.integer]:
    """Returns the ids of all rows, [rows, layers with experts, K]."""
    ids = np.frombuffer(experts.data, f"<u{experts.id_bytes}")
    reported, ours = (experts.num_layers, experts.top_k), (len(shape.layers), shape.per_token)
    largest = int(ids.max(initial=0))
    if reported != ours or largest >= shape.number:
        raise ValueError(
            f"the rollout engine reports {reported[1]} experts in {reported[0]} layers, up to "
            f"number {largest}, and the policy chooses {ours[1]} of {shape.number} in {ours[0]}: "
            "serve the model that is trained"
        )
    return ids.reshape(-1, *reported)
