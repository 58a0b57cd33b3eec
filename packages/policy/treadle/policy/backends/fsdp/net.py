"""A model of transformers behind one call: the log-probabilities of loss tokens.

Invariant: no more than `chunk` rows of logits exist at a time; with more than that, each chunk's
are computed again in the backward pass. What a model does to its logits (scales, caps, a bias) is
in the forward of its class, so that computes them, of hidden states that were computed before. A
model that is not a decoder and an output layer gives the logits of all positions at once.

Shape suffixes: B rows, P positions of a row, T loss tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.fsdp import attention
from treadle.policy.backends.fsdp.context import Context
from treadle.policy.backends.fsdp.description import EXPERTS
from treadle.policy.backends.fsdp.sharding import reach
from treadle.policy.backends.logprobs import from_logits, in_chunks
from treadle.policy.backends.usage import ModelWork, windows_of
from treadle.policy.backends.vision.shape import NAMING
from treadle.policy.client.hf_files import QUANTISED_KEYS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from treadle.policy.backends.fsdp.batches import MicroBatch
    from treadle.policy.backends.fsdp.description import FsdpModel
    from treadle.policy.backends.vision.rows import ImageRows

_LENGTHS = (7, 4)
"""Of the sequences that show how a model can be run: short, as each is run several times."""
_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""Names of the setting how many experts a token goes to."""
_TOLERANCE = 1e-4
"""Of logits, relative to the largest: a leak is far above, float32 far below."""


class Net(nn.Module):
    """The model and its output layer.

    Attributes:
        packs: Whether sequences may be end to end in one row.
        lora_scaling: Factor of the adapters' output; 0 without adapters.
    """

    lora_scaling = 0.0
    _trains_tower = False

    def __init__(self, model: PreTrainedModel, *, chunk: int, context: Context) -> None:
        """Finds out how the model can be run, by running it on a few ids; collective.

        Args:
            chunk: Most rows of logits to hold at a time.
            context: The ranks that share the positions of a row.

        Raises:
            UnsupportedModelError: A position sees what is after it, or ranks cannot share a row.
        """
        super().__init__()
        self.model: Any = model
        model.eval()  # type: ignore[no-untyped-call]  # without dropout; transformers' has no types
        self._chunk, self._context = chunk, Context()  # until it is known how one process does it
        ids = torch.randint(
            model.config.get_text_config().vocab_size,
            (sum(_LENGTHS),),
            generator=torch.Generator().manual_seed(0),
        )
        parts = ids.split(_LENGTHS)
        with torch.no_grad():
            alone = torch.cat([self._whole(part[None])[0] for part in parts])
            rows = torch.stack([nn.functional.pad(p, (0, _LENGTHS[0] - len(p))) for p in parts])
            padded = self._whole(rows)
            padded = torch.cat([row[:n] for row, n in zip(padded, _LENGTHS, strict=True)])
            if not _are_close(padded, alone):
                raise UnsupportedModelError(
                    f"model type {model.config.model_type!r} is not causal: its log-probabilities "
                    "depend on later tokens"
                )
            self._behind_decoder = _gives(
                lambda: self._logits(self._hidden(ids[None, : _LENGTHS[0]], ())[0]),
                alone[: _LENGTHS[0]],
            )
            self.packs = self._can_pack(ids, alone)
            self._context = context
            if context.size > 1 and not (self.packs and self._can_share(ids, alone)):
                raise UnsupportedModelError(
                    f"policy.parallel.context={context.size}: ranks cannot "
                    f"share the rows of model type {model.config.model_type!r}; set it to 1"
                )

    def _can_pack(self, ids: Tensor, alone_TV: Tensor) -> bool:
        """Returns whether packed sequences see only themselves; sets the attention for it."""
        if not self.model._supports_attention_backend or self.model._is_stateful:
            return False
        before = self.model.config._attn_implementation
        # A vision tower keeps its own: its rows are not those of sequences.
        sees = hasattr(self.model.base_model, "visual")
        own = {"text_config": attention.NAME} if sees else attention.NAME
        self.model.set_attn_implementation(own)
        with attention.packed(_LENGTHS):
            can = _gives(lambda: self._whole(ids[None], _LENGTHS)[0], alone_TV)
        if not can:
            self.model.set_attn_implementation(before)
        return can

    def _can_share(self, ids: Tensor, alone_TV: Tensor) -> bool:
        """Returns whether ranks that have some of the positions each compute what one does."""
        filling = -len(ids) % self._context.size
        lengths = [*_LENGTHS, *[1] * filling]
        row = nn.functional.pad(ids, (0, filling))[None]

        def shared() -> Tensor:
            with attention.packed(lengths, self._context):
                return self._context.gathered(self._whole(row, lengths)[0])[: len(ids)]

        return _gives(shared, alone_TV)

    def forward(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, ...]:
        """Returns the [T] log-probabilities and entropies of the loss tokens, in nats."""

        def one(
            logits_TV: Tensor, targets_T: Tensor, masks: Sequence[bytes]
        ) -> tuple[Tensor, Tensor]:
            return from_logits(
                logits_TV,
                targets_T,
                masks,
                vocab_size=logits_TV.shape[-1],
                group=None,
                temperature=temperature,
            )

        own = self._context.own_tokens(micro)
        if not self._behind_decoder:
            logits = self._whole(micro.ids_BP, micro.lengths).flatten(0, 1)
            return own.of_all_ranks(one(logits[own.predictors_M], own.targets_M, own.masks))

        def of_hidden(
            rows_TH: Tensor, targets_T: Tensor, masks: Sequence[bytes]
        ) -> tuple[Tensor, Tensor]:
            return one(self._logits(rows_TH), targets_T, masks)

        hidden_MH = self._states(micro)[own.predictors_M]
        found = in_chunks(of_hidden, hidden_MH, own.targets_M, own.masks, chunk=self._chunk)
        return own.of_all_ranks(found)

    def _whole(self, ids_BP: Tensor, lengths: Sequence[int] = ()) -> Tensor:
        """Returns the [B, P, V] logits of all positions of this rank."""
        logits: Tensor = self.model(**self._inputs(ids_BP, lengths)).logits
        return logits

    def _hidden(self, ids_BP: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns the [B, P, H] hidden states that the output layer takes."""
        inputs = self._inputs(ids_BP, lengths)
        hidden: Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden

    def _inputs(self, ids_BP: Tensor, lengths: Sequence[int]) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": ids_BP, "use_cache": False}
        if lengths:  # else positions are those of the row
            positions = torch.cat([torch.arange(n) for n in lengths])
            inputs["position_ids"] = positions.to(ids_BP.device)[None]
        if self._context.size > 1:
            # Without a mask, masks would be made of where this rank's positions begin again.
            own = {name: self._context.part(inputs[name]) for name in ("input_ids", "position_ids")}
            inputs |= own | {"attention_mask": torch.ones_like(own["input_ids"])}
        return inputs

    def _states(self, micro: MicroBatch) -> Tensor:
        """Returns the [B P, H] hidden states of this rank's positions, one row after another."""
        if micro.images is None:
            hidden_BPH = self._hidden(micro.ids_BP, micro.lengths)
            if self._trains_tower and torch.is_grad_enabled():  # by the images of other ranks
                hidden_BPH = reach(hidden_BPH, self.model.base_model.visual.parameters())
        else:
            hidden_BPH = self._seeing(micro, micro.images)
        return hidden_BPH.flatten(0, 1)

    def _seeing(self, micro: MicroBatch, images: ImageRows) -> Tensor:
        """Returns the [1, R, H] hidden states, with image features in the rows of `images`.

        The model's own forward pass would treat every placeholder as an image, even sampled ones.
        """
        base = self.model.base_model
        ids_1R, extra = micro.ids_BP, dict[str, Any]()
        if self._context.size > 1:  # the tower computes all images on each rank
            ids_1R = self._context.part(micro.ids_BP)
            count = ids_1R.shape[1]
            images = images.of_rows(self._context.rank * count, count)
            extra["attention_mask"] = torch.ones_like(ids_1R)  # as in `_inputs`
        assert micro.positions_31P is not None
        embedded_RH = base.get_input_embeddings()(ids_1R)[0]
        with torch.set_grad_enabled(self._trains_tower and torch.is_grad_enabled()):
            found = base.get_image_features(images.patches_XD, images.grids_N3)
        features = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        first_KH, *more = (torch.cat(list(each))[images.index_K] for each in features)
        filled_RH = embedded_RH.index_copy(0, images.rows_K, first_KH.to(embedded_RH.dtype))
        if more:
            mask = torch.zeros_like(ids_1R, dtype=torch.bool)
            mask[0, images.rows_K] = True
            extra |= {"visual_pos_masks": mask, "deepstack_visual_embeds": more}
        hidden: Tensor = base.language_model(
            inputs_embeds=filled_RH[None],
            position_ids=self._context.part(micro.positions_31P),
            use_cache=False,
            **extra,
        ).last_hidden_state
        return hidden

    def freeze_tower(self, *, frozen: bool) -> None:
        """Leaves the vision tower as it is, or has it trained; other models have none."""
        if hasattr(self.model.base_model, "visual"):
            self._trains_tower = not frozen
            if not self.packs or not self._behind_decoder:
                raise UnsupportedModelError(
                    f"model type {self.model.config.model_type!r} cannot be packed, and images are "
                    "packed only"
                )
            self.model.base_model.visual.requires_grad_(not frozen)

    def _logits(self, rows_TH: Tensor) -> Tensor:
        """Returns the [T, V] logits of hidden states."""
        name = self.model.base_model_prefix
        decoder = getattr(self.model, name)
        setattr(self.model, name, _Given(decoder, rows_TH[None]))
        try:
            logits: Tensor = self.model(input_ids=None, use_cache=False).logits[0]
        finally:
            setattr(self.model, name, decoder)
        return logits

    def layers(self) -> Iterator[nn.Module]:
        """Yields the model's layers: each is sharded, and computed again, as a whole."""
        count = self.model.config.get_text_config().num_hidden_layers
        decoder = getattr(self.model.base_model, "language_model", self.model)
        for module in decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                yield from module
                return

    def work(self, model: FsdpModel, *, passes: int) -> ModelWork | None:
        """Returns what the arithmetic of a step follows from; see `ModelWork`.

        None where the config does not have how many experts a token goes to.
        """
        config = self.model.config.get_text_config()
        number = next((n for name in EXPERTS if (n := getattr(config, name, None))), 1)
        per_token = next((n for name in _PER_TOKEN if (n := getattr(config, name, None))), None)
        if not model.num_heads or (number > 1 and per_token is None):
            return None
        weights, layers = 0.0, list(self.layers())
        for name, parameter in ((n, p) for layer in layers for n, p in layer.named_parameters()):
            if parameter.dim() > 1 and "lora_" not in name:
                is_expert = "experts" in name and "shared" not in name
                weights += parameter.numel() * ((per_token or 1) / number if is_expert else 1.0)
        size: float = model.head_dim
        if value := getattr(config, "v_head_dim", None):  # latent attention
            size = (config.qk_nope_head_dim + config.qk_rope_head_dim + value) / 2
        return ModelWork(
            weights=weights,
            head=model.vocab_size * model.hidden_size,
            heads=round(model.num_heads * size),
            windows=windows_of(_windows(config, len(layers))),
            passes=passes,
        )

    def recompute(self) -> None:
        """Has each layer keep its input only, and run again in the backward pass.

        Raises:
            UnsupportedModelError: The layers of this model cannot.
        """
        for layer in self.layers():
            if not isinstance(layer, GradientCheckpointingLayer):
                raise UnsupportedModelError(
                    f"policy.recompute=full: {type(layer).__name__} of transformers has no "
                    "gradient checkpointing; set policy.recompute=none"
                )
            typed: Any = layer  # transformers sets the function, and does not declare it
            typed.gradient_checkpointing = True
            typed._gradient_checkpointing_func = partial(
                checkpoint, use_reentrant=False, preserve_rng_state=False
            )
            layer.training = True  # of the layer itself: dropout is off, see `load`


def _windows(config: Any, num_layers: int) -> list[int | None]:
    """Returns the window of each layer with attention over tokens; None: over all before."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        return [window] * num_layers
    found: list[int | None] = []
    for kind in kinds:
        if "sliding" in kind:
            found.append(window)
        elif "chunked" in kind:
            found.append(config.attention_chunk_size)
        elif ("attention" in kind or kind == "hybrid") and "linear" not in kind:
            found.append(None)
    return found


class ValueNet(Net):
    """The model with a value head in place of the output layer.

    The head begins at 0, and so do all values: the first advantages are those without a critic.
    """

    def __init__(self, model: PreTrainedModel, *, chunk: int, context: Context) -> None:
        """See `Net`; raises `UnsupportedModelError` if the model gives no hidden states."""
        super().__init__(model, chunk=chunk, context=context)
        if not self._behind_decoder:
            raise UnsupportedModelError(
                f"model type {model.config.model_type!r} has no critic: its hidden states are not "
                "what its output layer takes"
            )
        columns = self.model.get_output_embeddings().weight.shape[1]
        self.value_weight = nn.Parameter(torch.zeros(columns))
        self.model = self.model.base_model

    def forward(self, micro: MicroBatch, temperature: float = 1.0) -> tuple[Tensor, ...]:
        """Returns the [T] values of the states before the loss tokens, float32."""
        own = self._context.own_tokens(micro)
        hidden_MH = self._states(micro)[own.predictors_M]
        return own.of_all_ranks((hidden_MH.float() @ self.value_weight.float(),))


class _Given(nn.Module):
    """Stands in for a decoder whose hidden states are there already."""

    def __init__(self, decoder: nn.Module, hidden_1TH: Tensor) -> None:
        super().__init__()
        # Past torch's registry of modules: heads read more of a decoder than its output.
        self.__dict__["decoder_before"] = decoder
        self.__dict__["output"] = _Output(hidden_1TH)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["decoder_before"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Returns them, as the decoder does."""
        return self.output


class _Output:
    """A decoder's output with the hidden states only; every other attribute is None."""

    def __init__(self, hidden_1TH: Tensor) -> None:
        self.last_hidden_state = hidden_1TH

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def load(folder: Path) -> PreTrainedModel:
    """Returns the model of a Hugging Face folder, in float32, without dropout.

    Weights that are quantised are read with their scales.

    Raises:
        UnsupportedModelError: Some of its weights are missing or of another shape.
        ValueError: A weight is infinite or NaN.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
    quantised = getattr(config, QUANTISED_KEYS[0], None)
    if quantised is not None:
        quantised["dequantize"] = True
    sees = config.model_type in NAMING
    loader: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model: PreTrainedModel
    model, found = loader.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
    )
    if quantised is not None:
        del model._weight_conversions  # they would quantise what is exported
    for what in ("missing_keys", "mismatched_keys"):
        if found[what]:
            raise UnsupportedModelError(
                f"{folder} does not have the weights of its config.json: {what.replace('_', ' ')} "
                f"{', '.join(sorted(map(str, found[what]))[:3])}"
            )
    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise ValueError(f"{folder}: its weights are not finite")
    return model


def _gives(compute: Callable[[], Tensor], want: Tensor) -> bool:
    """Returns whether a way to run the model gives the same; others are there if it does not."""
    try:
        return _are_close(compute(), want)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError):
        return False  # modules of transformers differ in what they take


def _are_close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool(
        (got - want).abs().max() <= _TOLERANCE * want.abs().max()
    )
