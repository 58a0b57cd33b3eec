"""Activation functions whose bits do not depend on what else a step computes.

torch computes SiLU, and GELU by tanh, in pairs of vectors, and the rest after the last pair with
other instructions, whose results may differ. Each thread has such a rest: where it lies depends on
the number of elements and of threads.
"""

from functools import partial
from typing import Any

import torch
from torch.nn import functional

_PAIR = 32  # Elements of a pair of the longest vectors, those of AVX-512.
_PIECE = 1 << 14  # Elements that every activation of torch computes on one thread.


def make_exact(model: torch.nn.Module) -> None:
    """Makes the activations of a model exact: each element has the same bits in every tensor."""
    for module in model.modules():
        if type(module).__module__ in (torch.nn.SiLU.__module__, "transformers.activations"):
            forward: Any = module.forward
            module.forward = partial(exact, forward)


def exact(activation: Any, values: torch.Tensor) -> torch.Tensor:
    """Returns ``activation(values)`` of a function by element, computed in whole vectors."""
    num_values = values.numel()
    flat = functional.pad(values.reshape(-1), (0, -num_values % _PAIR))
    pieces = [activation(piece) for piece in flat.split(_PIECE)]
    return torch.cat(pieces)[:num_values].view(values.shape)
