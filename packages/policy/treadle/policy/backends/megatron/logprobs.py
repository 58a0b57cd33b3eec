"""Token log-probabilities and entropies from hidden states, under vocabulary parallelism.

Invariant: columns beyond the real vocabulary take no part in the softmax (Megatron pads the
vocabulary, and a padded column has logit 0, not minus infinity), and no more than `chunk` rows of
logits exist at a time: with more rows than that, each chunk's logits are computed again in the
backward pass.

Shape suffixes: T tokens, H hidden, V columns of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from treadle.policy.backends.logprobs import from_logits, in_chunks
from treadle.policy.backends.megatron import device

device.install()

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region  # noqa: E402


def logprobs_and_entropy(
    hidden_TH: Tensor,
    head_VH: Tensor,
    targets_T: Tensor,
    masks: Sequence[bytes] = (),
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    chunk: int,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each target and the entropy, in nats, float32.

    Args:
        hidden_TH: Normed hidden states, the same on every rank of the group.
        head_VH: This rank's rows of the output layer.
        targets_T: Token ids, each in [0, vocab_size).
        masks: Sampling masks of the targets; empty: the distribution is over all ids.
        group: The tensor-parallel group; None if this rank has the whole vocabulary.
        chunk: Most rows of logits to hold at a time.
        temperature: Above 0; the distribution is the softmax of logits / temperature.
        softcap: c, where the model's logits are c tanh(x / c) of the products x; None: x.

    Returns:
        Two [T] tensors, the same on every rank of the group.
    """

    def one(rows_TH: Tensor, ids_T: Tensor, masks_T: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        if group is not None:
            rows_TH = copy_to_tensor_model_parallel_region(rows_TH)
        logits_TV = F.linear(rows_TH.to(head_VH.dtype), head_VH)
        if softcap is not None:
            logits_TV = (logits_TV.float() / softcap).tanh() * softcap
        return from_logits(
            logits_TV,
            ids_T,
            masks_T,
            vocab_size=vocab_size,
            group=group,
            temperature=temperature,
        )

    return in_chunks(one, hidden_TH, targets_T, masks, chunk=chunk)
