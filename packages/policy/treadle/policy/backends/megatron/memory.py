"""The estimate of a policy rank's memory: what the tensors of a training step take.

With P the parameters of the rank, Q those that are trained (P without an adapter and without a
frozen vision tower), b the bytes of `policy.dtype` and D the data-parallel times the context size:

| part | bytes |
|---|---|
| weights | b P |
| gradients | 4 Q, as they are summed in float32 |
| optimizer | 8 Q / D for Adam's two moments, and 4 Q / D for a float32 copy under bfloat16 |
| reference | b Q where there is one, and b Q again while it is computed; 0 with an adapter |
| another model as the reference | b P' of its own parameters |
| activations | R L s + R 4 H b + 2 b n V / T + 12 min(n V / T, 2^20) |

With D C above 1, experts have D C T / X instead, T the tensor- and X the expert-parallel size.

R rows of a micro-batch, which context ranks have equal shares of, H hidden, L layers of the stage
times the micro-batches that it has under way (one per stage from it to the last), V the padded
vocabulary, T the tensor-parallel size, and n the rows whose logits exist at a time. A layer keeps,
per row, from forward to backward

    s = b ((6 + m) H + (4 F + a A + 2 K) / T)
        + (4 - b) ((4 + 3 m) H + 2 (A + K) / T where normed)

bytes: H for the input and output of both norms and both residual sums, F for the projections of the
feed-forward part, A and K for queries and for keys or values of all heads, m for the norms of
outputs (2 in GLM-4, Gemma 2 and 3, else 0), and the float32 copies that norms make of bfloat16; a
is 2 without norms of queries and keys, 4 with. Sequence parallelism divides H by T too. Of logits
there are they and their gradient, in b bytes; three float32 copies of up to 2^20 of them, which a
CPU computes at a time; and, where they are capped, 12 bytes instead of 2 b. In a layer with
experts, of which a row goes to N out of E with G columns each, 4 b F is N b (6 G + 2 H) + 16 E, if
every rank gets the same part of the choices. With `policy.recompute=full` a layer keeps b H; to
them comes the larger of the logits' part and one layer with its gradients, s + 12 F / T. With
`policy.recompute=selective` and `mlp` a layer keeps b 4 F / T less; to them comes the larger of the
logits' part and one feed-forward part with its gradients, (4 b + 12) F / T. `core_attn` leaves out
the padding between sequences, which is not in the estimate. The measured peak of a step on the CPU
is within 12 % of this for the models of `memory_test.py`, in both dtypes (it allows 15 %).

With context ranks the backward pass of a layer also needs the keys and values of all rows, and
their float32 gradients twice: (2 b + 16) K / T for each row of the micro-batch. They exist
beside what the layers keep, and not beside the logits.

Not in the estimate: the process itself (Python, torch and Megatron: 0.5 GB, and a CUDA context on a
GPU), buffers of communication and of the weight sync, the rollout servers, and, of a model that
sees, what its tower computes of the images of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.policy.backends.description import NUMBERS_AT_ONCE, MemoryEstimate
from treadle.policy.backends.megatron.architecture import padded_vocab
from treadle.policy.config.policy import PolicyConfig

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.architecture import Architecture

__all__ = ["estimate_memory", "stage_parameters"]

_BYTES = {"float32": 4, "bfloat16": 2}


def estimate_memory(
    architecture: Architecture,
    policy: PolicyConfig,
    *,
    rows: int,
    loss_rows: int | None = None,
    reference: bool = False,
    other_reference: Architecture | None = None,
) -> MemoryEstimate:
    """Returns the estimate of the largest pipeline stage, by the formulas of this module.

    Args:
        rows: Tokens of a micro-batch, over all context ranks.
        loss_rows: Rows that are trained on; None: all of them.
        other_reference: The model that is the reference; None: the starting weights are.
    """
    stages = (
        _stage(
            architecture,
            policy,
            stage=stage,
            rows=rows,
            loss_rows=rows if loss_rows is None else loss_rows,
            reference=reference,
            other_reference=other_reference,
        )
        for stage in range(policy.parallel.pipeline)
    )
    return max(stages, key=lambda estimate: estimate.total)


def _stage(
    architecture: Architecture,
    policy: PolicyConfig,
    *,
    stage: int,
    rows: int,
    loss_rows: int,
    reference: bool,
    other_reference: Architecture | None,
) -> MemoryEstimate:
    parallel, size = policy.parallel, _BYTES[policy.dtype]
    gathered = 0.0
    if parallel.context > 1:
        keys = architecture.num_kv_heads * architecture.head_dim
        gathered = rows * (2 * size + 16) * keys / parallel.tensor
    rows, loss_rows = (-(-count // parallel.context) for count in (rows, loss_rows))
    is_last = stage == parallel.pipeline - 1
    base = stage_parameters(architecture, policy, stage=stage)
    adapters = _adapter_parameters(architecture, policy)
    frozen = _tower_parameters(architecture, stage=stage) * policy.freeze_vision_tower
    count, trained = base + adapters, adapters or base - frozen
    copy = 4 if policy.dtype == "bfloat16" else 0
    layers, sparse = _layers(architecture, policy, stage=stage)
    counts = [(n, c) for n, c in ((False, layers - sparse), (True, sparse)) if c]
    parts = {n: rows * _kept_by_a_feed_forward(architecture, policy, sparse=n) for n, _ in counts}
    rest = rows * _kept_by_a_layer(architecture, policy)
    # Of one feed-forward part that is computed again, the gradients come to what it keeps.
    again = max(parts[n] + rows * 12 * _columns(architecture, policy, sparse=n) for n, _ in counts)
    head = 0.0
    if is_last:
        vocab = padded_vocab(architecture.vocab_size, parallel.tensor) // parallel.tensor
        count_of_logits = min(loss_rows, policy.logits_chunk_tokens) * vocab
        logits = (2 * size if architecture.logit_softcap is None else 12) * count_of_logits
        head = (
            logits
            + 12 * min(count_of_logits, NUMBERS_AT_ONCE)
            + rows * 4 * architecture.hidden_size * size
        )
    under_way = parallel.pipeline - stage
    if policy.recompute == "full":
        inputs = rows * layers * size * _hidden(architecture, policy)
        activations = under_way * inputs + max(rest + again + gathered, head)
    elif policy.recompute == "selective" and "mlp" in policy.recompute_modules:
        activations = under_way * layers * rest + max(again, head, gathered)
    else:
        kept = layers * rest + sum(count * parts[n] for n, count in counts)
        activations = under_way * kept + max(head, gathered)
    copied = size * trained if reference and not adapters and other_reference is None else 0
    other = 0
    if reference and other_reference is not None:
        other = size * stage_parameters(other_reference, policy, stage=stage)
    experts = 0 if adapters else expert_parameters(architecture, policy, stage=stage)
    # The optimizer's state is shared by the ranks with the same parameters, if several have all.
    sharing = parallel.context * parallel.data
    copies = sharing * parallel.tensor // parallel.expert if sharing > 1 else 1
    held = -(-(trained - experts) // sharing) + -(-experts // copies)
    return MemoryEstimate(
        weights=size * count,
        gradients=4 * trained,
        optimizer=(8 + copy) * held,
        reference=copied or other,
        activations=round(activations),
        exchanged=copied,
    )


def stage_parameters(architecture: Architecture, policy: PolicyConfig, *, stage: int) -> int:
    """Returns the parameters of a rank of this pipeline stage, padding included, adapters not."""
    tensor, pipeline = policy.parallel.tensor, policy.parallel.pipeline
    hidden, head_dim = architecture.hidden_size, architecture.head_dim
    queries, keys = architecture.num_heads * head_dim, architecture.num_kv_heads * head_dim
    split = 2 * hidden * (queries + keys)
    split += (queries + 2 * keys) * architecture.qkv_bias
    norms = architecture.blocks.norms.num * hidden + 2 * head_dim * architecture.qk_norm
    layer = split // tensor + norms
    table = padded_vocab(architecture.vocab_size, tensor) // tensor * hidden
    layers, sparse = _layers(architecture, policy, stage=stage)
    count = layers * layer + (layers - sparse) * (3 * hidden * architecture.ffn_size // tensor)
    count += sparse * hidden * architecture.experts.number if architecture.experts else 0
    count += expert_parameters(architecture, policy, stage=stage)
    first, last = stage == 0, stage == pipeline - 1
    count += table * first
    # The last stage has a copy of a tied embedding, unless it is the first too.
    count += (table * (not (architecture.tied and first)) + hidden) * last
    return count + _tower_parameters(architecture, stage=stage)


def _tower_parameters(architecture: Architecture, *, stage: int) -> int:
    """Returns the parameters of the vision tower, which every rank of the first stage has."""
    vision = architecture.vision
    return 0 if vision is None or stage else vision.num_parameters


def expert_parameters(architecture: Architecture, policy: PolicyConfig, *, stage: int) -> int:
    """Returns the parameters of the experts of a rank of this pipeline stage."""
    if (shape := architecture.experts) is None:
        return 0
    _, sparse = _layers(architecture, policy, stage=stage)
    experts = shape.number // policy.parallel.expert
    return sparse * experts * 3 * architecture.hidden_size * shape.ffn_size


def _layers(architecture: Architecture, policy: PolicyConfig, *, stage: int) -> tuple[int, int]:
    """Returns the number of layers of a pipeline stage, and of those with experts among them."""
    count = architecture.num_layers // policy.parallel.pipeline
    numbers = range(stage * count, (stage + 1) * count)
    return count, architecture.experts.among(numbers) if architecture.experts else 0


def _adapter_parameters(architecture: Architecture, policy: PolicyConfig) -> int:
    """Returns the number of parameters of a rank's adapters.

    Ranks share the outputs of a column-parallel matrix and the inputs of a row-parallel one.
    """
    lora, tensor = policy.lora, policy.parallel.tensor
    layer = 0
    for name in architecture.adapted(lora.targets) if lora.rank else ():
        inputs, outputs = architecture.matrices[name]
        row_parallel = name in ("o_proj", "down_proj")
        sides = (inputs // tensor, outputs) if row_parallel else (inputs, outputs // tensor)
        layer += lora.rank * sum(sides)
    return architecture.num_layers // policy.parallel.pipeline * layer


def _hidden(architecture: Architecture, policy: PolicyConfig) -> float:
    """Returns the hidden elements that a rank has of a row between two layers."""
    parallel = policy.parallel
    return architecture.hidden_size / (parallel.tensor if parallel.sequence else 1)


def _kept_by_a_layer(architecture: Architecture, policy: PolicyConfig) -> float:
    """Returns the bytes that a layer keeps of a row, without its feed-forward part."""
    size, tensor = _BYTES[policy.dtype], policy.parallel.tensor
    queries = architecture.num_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    normed = architecture.qk_norm
    a, k = (4, 2) if normed else (2, 2)
    hidden = _hidden(architecture, policy)
    after = architecture.blocks.norms.num - 2
    elements = (6 + after) * hidden + (a * queries + k * keys) / tensor
    copies = (4 - size) * ((4 + 3 * after) * hidden + 2 * (queries + keys) * normed / tensor)
    return size * elements + copies


def _columns(architecture: Architecture, policy: PolicyConfig, *, sparse: bool) -> float:
    """Returns the columns of the feed-forward part that a rank computes of a row, if evenly."""
    columns = architecture.ffn_size
    if sparse and (shape := architecture.experts) is not None:
        columns = shape.per_token * shape.ffn_size
    return columns / policy.parallel.tensor


def _kept_by_a_feed_forward(
    architecture: Architecture, policy: PolicyConfig, *, sparse: bool
) -> float:
    """Returns the bytes that the feed-forward part of a layer keeps of a row."""
    size, tensor = _BYTES[policy.dtype], policy.parallel.tensor
    shape = architecture.experts
    if not sparse or shape is None:
        return 4 * size * _columns(architecture, policy, sparse=False)
    choices = shape.per_token / tensor
    return (
        6 * size * _columns(architecture, policy, sparse=True)
        + 2 * size * choices * architecture.hidden_size
        + 16 * shape.number / tensor
    )
