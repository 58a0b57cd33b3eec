"""The rows of a micro-batch, as the routers are told of them.

It travels with the micro-batch, as the field `routing` of its `Segments`, so that a layer that is
computed again in the backward pass is told the same, however many micro-batches are under way.

Shape suffixes: P packed rows, L layers of the whole model, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rows of one micro-batch, as the routers of all layers know them.

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
