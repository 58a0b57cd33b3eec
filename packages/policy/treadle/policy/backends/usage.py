"""How well a training step uses its devices: tokens per second, needed arithmetic, and memory.

The needed arithmetic (FLOPs, a multiplication and an addition are two) is that of matrix products
and of causal attention, forward and twice that backward: not what a step computes again
(`policy.recompute`), pads, or drops. Embeddings, norms, activations and a vision tower count
nothing, and the output layer counts for loss tokens only. With adapters the frozen weights have no
gradient, so a backward pass is once a forward pass.

The model FLOPs utilisation (MFU) is this over the time of the step and the peak of its devices for
dense bfloat16 products (Chowdhery et al., arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from treadle.policy.client.batch import has_gradient, input_length

if TYPE_CHECKING:
    from treadle.policy.backend import PolicyBackend
    from treadle.policy.client.types import StepStats, TrainSequence

_PEAK_TFLOPS: Final = (
    *(("B300", 2250.0), ("B200", 2250.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.0)),
    *(("H100", 989.0), ("H200", 989.0), ("H800", 989.0), ("H20", 148.0), ("A100", 312.0)),
    *(("A800", 312.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0), ("A10", 125.0)),
    *(("RTX 4090", 165.2), ("RTX 3090", 71.0)),
)
"""By a part of the name, from NVIDIA's data sheets, without sparsity; the first that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What the arithmetic of a step follows from.

    Attributes:
        weights: Numbers of all matrices of layers that a token is multiplied with.
        head: Numbers of the output layer.
        heads: Query heads times head size.
        windows: How many layers have attention over so many tokens; None: over all before it.
        passes: Passes of the size of a forward pass: 3, or 2 where the weights are frozen.
    """

    weights: float
    head: float
    heads: int
    windows: Mapping[int | None, int]
    passes: int = 3

    def flops(self, lengths: Sequence[int], loss_tokens: int) -> float:
        """Returns those of a step over sequences of these lengths."""
        products = 2.0 * (self.weights * sum(lengths) + self.head * loss_tokens)
        pairs = sum(
            count * sum(_pairs(length, window) for length in lengths)
            for window, count in self.windows.items()
        )
        return self.passes * products + 3 * 4.0 * self.heads * pairs


def _pairs(length: int, window: int | None) -> float:
    """Returns how many pairs of a token and one that it sees there are, about."""
    if window is None or length <= window:
        return length * length / 2
    return window * (length - window / 2)


def windows_of(sizes: Sequence[int | None]) -> Mapping[int | None, int]:
    """Returns `ModelWork.windows` for the window of each layer."""
    return Counter(sizes)


def peak_flops(name: str) -> float | None:
    """Returns the peak of a GPU of this name, FLOP/s; None if it is not known."""
    return next((1e12 * tflops for part, tflops in _PEAK_TFLOPS if part in name), None)


def step_usage(
    policy: PolicyBackend, sequences: Sequence[TrainSequence], step: StepStats
) -> dict[str, float]:
    """Returns the metrics of a step that this rank took with others; memory is this rank's.

    - policy/tokens_per_second: tokens that went through the step, per rank.
    - policy/mfu: 0 to 1; on GPUs whose peak is known, where no prefixes are shared.
    - policy/memory_peak_bytes: the most that tensors took, on a GPU, and of that
      policy/memory_<kind>_bytes of parameters, gradients and optimizer; the rest is activations.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    found = {"policy/tokens_per_second": step.num_tokens / step.time_s / ranks}
    if policy.device.type != "cuda":
        return found
    found["policy/memory_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    for kind, size in policy.held_bytes().items():
        found[f"policy/memory_{kind}_bytes"] = float(size)
    peak = peak_flops(torch.cuda.get_device_name())
    is_shared = step.num_rows < step.num_tokens  # prefixes, whose tokens were computed once
    if peak is not None and not is_shared and (work := policy.work()) is not None:
        flops = needed_flops(work, sequences, step)
        found["policy/mfu"] = flops / step.time_s / ranks / peak
    return found


def needed_flops(work: ModelWork, sequences: Sequence[TrainSequence], step: StepStats) -> float:
    """Returns those of the sequences that went through a step."""
    chosen = [sequence for sequence in sequences if sequence.num_loss_tokens]
    if step.num_computed < len(chosen):  # then the loss left those without a gradient out
        chosen = [sequence for sequence in chosen if has_gradient(sequence)]
    return work.flops(
        [input_length(sequence) for sequence in chosen],
        sum(sequence.num_loss_tokens for sequence in chosen),
    )
