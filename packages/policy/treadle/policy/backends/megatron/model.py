"""The policy model: a Hugging Face architecture as a Megatron-core GPT.

Invariant: given the same weights, the logits are those of transformers (fp32: within 1e-4), for
any tensor- and pipeline-parallel size. Built from Megatron's local layer spec, so neither
Transformer Engine nor Apex is needed, on a CPU or on a GPU; the norm and the attention are ours, as
Megatron's local ones support neither sequence parallelism nor packed sequences.

Unlike Megatron's `GPTModel.forward`, ours stops before the output layer. The head is applied by
`logprobs.py`, only where a token is trained on and a chunk at a time, so
logits never exist for the whole micro-batch.

Shape suffixes: P packed rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.fused import fused
from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.architecture import padded_vocab
from treadle.policy.backends.megatron.attention import PackedAttention, ScoreRule, Segments
from treadle.policy.backends.megatron.experts import check
from treadle.policy.backends.megatron.experts.layer import layer_spec, mark_experts, settings
from treadle.policy.backends.megatron.lora.linears import adapt_layer, freeze_base
from treadle.policy.backends.megatron.rotary import RowRotation, frequencies, local_frequencies
from treadle.policy.backends.megatron.vision.tower import DeepstackLayer, VisionTower

device.install()

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.megatron.experts.shape import ExpertShape
    from treadle.policy.backends.megatron.parallel import World
    from treadle.policy.config.policy import PolicyConfig


class RMSNorm(torch.nn.Module):
    """The norm slot of a Megatron layer spec; correct under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """Called by Megatron, with more than is needed."""
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=device.device())
        )
        # Megatron sums the gradients of parameters so marked over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class OnePlusRMSNorm(RMSNorm):
    """The norm of Gemma: multiplies by 1 + weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        one_plus = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, one_plus, self.eps).to(x.dtype)


class NormAndAdd(torch.nn.Module):
    """The bias-dropout-add slot of a layer whose parts norm their output before it is added."""

    def __init__(self, norm: type[RMSNorm], config: Any) -> None:
        """Called by Megatron, with what the layer spec holds."""
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Returns the sum of the residual and the normed output, as a function of both."""
        return self._add

    def _add(
        self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        output, bias = output_and_bias
        assert bias is None and not dropout
        normed: Tensor = self.norm(output)
        return residual + normed


class PolicyModel(GPTModel):
    """One pipeline stage of the policy, up to and without the output layer."""

    def __init__(
        self, architecture: Architecture, *, trained_tower: bool = False, **kwargs: Any
    ) -> None:
        """`kwargs` are those of Megatron's `GPTModel`; `num_ids` is the vocabulary, not padded."""
        super().__init__(**kwargs)
        self.num_ids = architecture.vocab_size
        rotary, _ = frequencies(architecture)
        local = local_frequencies(architecture)
        both = [rotary] if local is None else [rotary, local]  # by `ScoreRule.rotation`
        self._frequencies = torch.stack(both).to(device.device())
        self._interleaved = architecture.blocks.interleaved
        scaled = architecture.blocks.scaled_embeddings
        # Rounded to the weights' type, as transformers does.
        self._embedding_scale = (
            torch.tensor(architecture.hidden_size**0.5, dtype=self.config.params_dtype)
            if scaled
            else None
        )
        self.logit_softcap = architecture.logit_softcap
        self.attention_is_plain = architecture.attention_is_plain
        vision = architecture.vision
        # Which of time, height and width turns each pair of dimensions.
        self._axes = None if vision is None else torch.tensor(vision.axes).to(device.device())
        self.vision = None
        if vision is not None and self.pre_process:
            self.vision = VisionTower(
                vision, architecture.model_type, self.config, trained=trained_tower
            )

    def forward(self, ids_1P: Tensor, positions_P: Tensor, segments: Segments) -> Tensor:
        """Runs the stage.

        Args:
            ids_1P: Token ids; read by the first stage only.
            positions_P: Position of each row in its own sequence; [3, P] of a model that sees: in
                time, height and width.

        Returns:
            [P, 1, H] hidden states: normed by the last stage, and whole there even under
            sequence parallelism.
        """
        embedded: Tensor | None = self.embedding(ids_1P, None) if self.pre_process else None
        if embedded is not None and self._embedding_scale is not None:
            embedded = embedded * self._embedding_scale
        if embedded is not None and segments.images is not None:
            assert self.vision is not None, "only a model that sees is given images"
            images = segments.images
            if self.config.sequence_parallel:
                images = images.of_rows(self.pg_collection.tp.rank() * len(embedded), len(embedded))
            embedded, segments.images = self.vision.embed(embedded, images)
        if embedded is not None and torch.is_grad_enabled() and not embedded.requires_grad:
            # Under LoRA. Recomputed layers get gradients only through an input that has one.
            embedded.requires_grad_()
        segments.rotations = self._rotations(positions_P)
        hidden: Tensor = self.decoder(
            hidden_states=embedded, attention_mask=None, packed_seq_params=segments
        )
        if self.post_process and self.config.sequence_parallel:
            # Gradients of the head arrive summed over the group already, so the backward of this
            # gather only has to split.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden

    def _rotations(self, positions_P: Tensor) -> tuple[RowRotation, ...]:
        """Returns how the rows are turned, for each set of frequencies."""
        positions = positions_P.float()
        # [P, 1], or [P, R / 2] where the dimensions of a row have different positions.
        positions = positions[:, None] if self._axes is None else positions[self._axes].T
        return tuple(
            RowRotation.of_angles(
                positions * frequencies,
                self.config.params_dtype,
                interleaved=self._interleaved,
            )
            for frequencies in self._frequencies
        )

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary / tensor, H] rows of the output layer; last stage only."""
        if self.share_embeddings_and_output_weights:
            weight: Tensor = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        return weight


def build(
    architecture: Architecture,
    config: PolicyConfig,
    world: World,
    kind: type[PolicyModel] | None = None,
) -> PolicyModel:
    """This rank's part of the model, its parameters not yet initialised; a `PolicyModel` or `kind`.

    Raises:
        UnsupportedModelError: The parallel sizes do not divide the model.
    """
    architecture.check_parallel(tensor=world.tensor, pipeline=world.pipeline)
    architecture.check_context(world.context)
    of_experts = architecture.experts
    for problem in check.split_problems(of_experts, config.parallel):
        raise UnsupportedModelError(problem)
    if of_experts and config.lora.rank:
        for problem in check.training_problems(architecture, config):
            raise UnsupportedModelError(problem)
    megatron = transformer_config(architecture, config, world)
    norm = OnePlusRMSNorm if architecture.blocks.one_plus_norms else RMSNorm
    dense = _layer_spec(architecture, megatron, norm)
    sparse = _layer_spec(architecture, megatron, norm, experts=of_experts) if of_experts else dense
    if config.lora.rank:
        for layer in (dense, sparse) if of_experts else (dense,):
            adapt_layer(layer, config.lora, architecture)
    num_layers = architecture.num_layers // world.pipeline
    first = world.pipeline_rank * num_layers
    layers = [
        sparse if of_experts and number in of_experts.layers else dense
        for number in range(first, first + num_layers)
    ]
    deepstack = 0 if architecture.vision is None else architecture.vision.deepstack
    for number in range(first, deepstack):
        layers[number] = replace(dense, module=DeepstackLayer)
    model: PolicyModel = (kind or PolicyModel)(
        architecture,
        trained_tower=not config.freeze_vision_tower,
        config=megatron,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),
        vocab_size=padded_vocab(architecture.vocab_size, world.tensor),
        max_sequence_length=architecture.max_positions,
        pre_process=world.is_first_stage,
        post_process=world.is_last_stage,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="none",
    )
    model.to(device.device())
    if config.lora.rank:
        freeze_base(model)
    mark_experts(model)
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


def _layer_spec(
    architecture: Architecture,
    config: TransformerConfig,
    norm: type[RMSNorm],
    *,
    experts: ExpertShape | None = None,
) -> ModuleSpec:
    """Returns Megatron's spec of a layer, with the variants of the architecture."""
    blocks, qk_norm = architecture.blocks, architecture.qk_norm
    layer = (
        get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
        if experts is None
        else layer_spec(experts, qk_norm=qk_norm)
    )
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = partial(PackedAttention, scores=_scores(architecture))
    if architecture.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    for slot, name in (
        ("self_attn_bda", blocks.norms.after_attention),
        ("mlp_bda", blocks.norms.after_mlp),
    ):
        if name is not None:
            spec = ModuleSpec(module=NormAndAdd, params={"norm": norm, "config": config})
            setattr(layer.submodules, slot, spec)
    return layer


def _scores(architecture: Architecture) -> tuple[ScoreRule, ...]:
    """Returns how each layer scores."""
    turning, factor = frequencies(architecture)
    found = []
    for layer in range(architecture.num_layers):
        window = architecture.window(layer)
        has_own = window is not None and architecture.rope_local_theta is not None
        scores = ScoreRule(
            scale=architecture.score_scale or architecture.head_dim**-0.5,
            window=window,
            softcap=architecture.score_softcap,
            more=None if has_own or factor == 1.0 else (2 * len(turning), factor),
            rotation=int(has_own),
        )
        found.append(scores)
    return tuple(found)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Final = {"silu": F.silu, "gelu_pytorch_tanh": _gelu_tanh}


def _gate_by_silu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, -1)
    return F.silu(gate) * up


def _gate_by_gelu_tanh(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, -1)
    return _gelu_tanh(gate) * up


_GATES: Final = {"silu": fused(_gate_by_silu), "gelu_pytorch_tanh": fused(_gate_by_gelu_tanh)}


def _leave(weight: Tensor) -> Tensor:
    return weight


def transformer_config(
    architecture: Architecture, config: PolicyConfig, world: World
) -> TransformerConfig:
    """Megatron's settings; everything not named here is its default."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    recompute: dict[str, Any] = {}
    if config.recompute == "full":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif config.recompute == "selective":
        recompute = {
            "recompute_granularity": "selective",
            "recompute_modules": list(config.recompute_modules),
        }
    settings_of_megatron = TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[architecture.activation],
        rotary_interleaved=architecture.blocks.interleaved,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=world.tensor,
        pipeline_model_parallel_size=world.pipeline,
        context_parallel_size=world.context,
        sequence_parallel=world.sequence_parallel,
        # Every parameter is read from the model folder. Initialising must stay on all the same: it
        # is where Megatron marks parameters as tensor-parallel, which the gradient norm goes by.
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        use_cpu_initialization=False,
        # Megatron's fusions need Apex or Transformer Engine, or are of no use: rotation and gated
        # activation are fused by ours, and a sum without dropout is one kernel.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        # Micro-batches differ in length; Megatron demands alltoall with that even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss is already normalised over the whole batch: gradients are plain sums.
        calculate_per_token_loss=True,
        **settings(architecture.experts, config, world, architecture.num_layers),
        **recompute,
    )
    # Megatron's place for an activation that takes gate and input at once.
    settings_of_megatron.use_te_activation_func = True
    settings_of_megatron.activation_func = _GATES[architecture.activation]
    return settings_of_megatron
