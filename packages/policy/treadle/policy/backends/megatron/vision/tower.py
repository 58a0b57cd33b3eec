"""The vision tower on the first stage, and the layers that take more of it than their input.

Invariant: a row of an image holds what the model's class in transformers puts there: the tower is
its own module. Every tensor-parallel rank has all of the tower and computes all of its images;
under sequence parallelism a rank keeps the rows that it has, and gradients are summed over ranks.

DeepStack (arXiv:2406.04334) adds features of inner layers of the tower to the output of the first
layers of the language model; those are on the first stage too.

Shape suffixes: P packed rows, N embeddings of all images, H hidden.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.policy.backends.megatron import device

device.install()

from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

if TYPE_CHECKING:
    from treadle.policy.backends.vision.rows import ImageRows
    from treadle.policy.backends.vision.shape import VisionShape


class _HandBack(torch.autograd.Function):
    """Rows as they are; backward, the gradients of leaves go to what the leaves were made of.

    A layer that is computed again runs its own backward pass, which would go through the
    tower's graph once per layer. It ends at the leaves instead, and the gradient of the layers'
    input, which passes here, is the last to come.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaves: tuple[Tensor, ...], *sources: Tensor) -> Tensor:
        ctx.leaves = leaves
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, *(leaf.grad for leaf in ctx.leaves)


class VisionTower(torch.nn.Module):
    """The tower of transformers, frozen or trained."""

    def __init__(self, shape: VisionShape, model_type: str, config: Any, *, trained: bool) -> None:
        """Builds it with random weights."""
        from transformers import CONFIG_MAPPING, AutoModel

        super().__init__()
        settings: Any = CONFIG_MAPPING[f"{model_type}_vision"](**json.loads(shape.config))
        models: Any = AutoModel
        self.model: Any = models.from_config(
            settings, dtype=config.params_dtype, attn_implementation="sdpa"
        )
        self._dtype: torch.dtype = config.params_dtype
        self._trained = trained
        self.model.requires_grad_(trained)
        for parameter in self.model.parameters():
            # See `model.RMSNorm`: the gradients of a rank are those of its rows.
            parameter.sequence_parallel = config.sequence_parallel

    def embed(self, embedded_P1H: Tensor, images: ImageRows) -> tuple[Tensor, ImageRows]:
        """Puts the embeddings of images into their rows.

        Args:
            embedded_P1H: Rows of this rank, text.

        Returns:
            The rows, and `images` with what the first layers add.
        """
        with torch.set_grad_enabled(self._trained and torch.is_grad_enabled()):
            found = self.model(images.patches_XD.to(self._dtype), grid_thw=images.grids_N3)
            features_NH: Tensor = found.pooler_output
            deepstack = tuple(getattr(found, "deepstack_features", ()))
        chosen_KH = features_NH.index_select(0, images.index_K)
        filled = embedded_P1H.index_copy(
            0, images.rows_K, chosen_KH[:, None].to(embedded_P1H.dtype)
        )
        if deepstack and deepstack[0].requires_grad:
            leaves = tuple(each.detach().requires_grad_() for each in deepstack)
            filled = _HandBack.apply(filled, leaves, *deepstack)  # type: ignore[no-untyped-call]
            deepstack = leaves
        return filled, replace(images, deepstack=deepstack)


class DeepstackLayer(TransformerLayer):
    """One of the first layers, whose output gets features of the images of the micro-batch."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called by Megatron, and once more in the backward pass where that computes it again."""
        hidden_P1H, context = super().forward(*args, **kwargs)
        images: ImageRows | None = kwargs["packed_seq_params"].images
        if images is None:
            return hidden_P1H, context
        features_NH = images.deepstack[self.layer_number - 1]
        added_KH = features_NH.index_select(0, images.index_K).to(hidden_P1H.dtype)
        return hidden_P1H.index_add(0, images.rows_K, added_KH[:, None]), context
