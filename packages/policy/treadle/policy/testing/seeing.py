"""Tiny models that see, sequences with images, and what transformers says of them."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import PIL.Image
import torch

from treadle.agent_loop import Image, PlacedImage
from treadle.policy.client.types import TrainSequence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

VOCAB: Final = 211
PLACEHOLDER: Final = 200
MERGED: Final = 8
"""Pixels of an embedding, along each side."""
SEEING: Final = ("qwen2_5_vl", "qwen3_vl")

_TEXT: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_TOWER: Final[Mapping[str, Any]] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
}
_ROPE: Final = {"rope_type": "default", "rope_theta": 1e4}


def write_seeing_model(
    folder: Path, model_type: str = "qwen2_5_vl", *, tied: bool = True, **text: Any
) -> PreTrainedModel:
    """Writes a random model of 4 layers with its image processor, and returns it.

    An embedding stands for 8 by 8 pixels. Norms and biases are random too. `text` are more settings
    of the language model.
    """
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config: Any = transformers.CONFIG_MAPPING[model_type]
    models: Any = transformers.AutoModelForImageTextToText
    if model_type == "qwen2_5_vl":
        rope = {**_ROPE, "mrope_section": [2, 3, 3]}
        of_text: dict[str, Any] = {}
        # A window holds 2 by 2 embeddings.
        of_tower: dict[str, Any] = {"fullatt_block_indexes": [1], "window_size": 16}
    else:
        rope = {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        of_text = {"head_dim": 16}
        of_tower = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    torch.manual_seed(0)
    model: PreTrainedModel = models.from_config(
        config(
            text_config={**_TEXT, **of_text, "rope_parameters": rope, **text},
            vision_config={**_TOWER, **of_tower},
            image_token_id=PLACEHOLDER,
            video_token_id=201,
            vision_start_token_id=202,
            vision_end_token_id=203,
            tie_word_embeddings=tied,
        ),
        attn_implementation="eager",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(3.0)
    model.train(False)
    model.save_pretrained(folder)
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    )
    processor.save_pretrained(folder)
    return model


def picture(width: int, height: int, *, seed: int = 0, mode: str = "RGB", **save: Any) -> Image:
    """Returns a PNG of noise."""
    bands = len(PIL.Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels.squeeze(-1) if bands == 1 else pixels, mode).save(
        file, "PNG", **save
    )
    return Image(data=file.getvalue(), mime="image/png")


def shown(
    parts: Sequence[Sequence[int] | Image], sampled: Sequence[int], *, advantage: float = 1.0
) -> TrainSequence:
    """Returns a sequence of text and images, and the tokens that are trained on after it.

    The sides of images are multiples of `MERGED`.
    """
    ids: list[int] = []
    images = []
    for part in parts:
        if not isinstance(part, Image):
            ids += part
            continue
        width, height = PIL.Image.open(io.BytesIO(part.data)).size
        count = (width // MERGED) * (height // MERGED)
        images.append(PlacedImage(image=part, start=len(ids), num_tokens=count))
        ids += [PLACEHOLDER] * count
    return TrainSequence(
        ids=(*ids, *sampled),
        loss_mask=(*(False for _ in ids), *(True for _ in sampled)),
        advantages=advantage,
        rollout_logprobs=(-5.0,) * (len(ids) + len(sampled)),
        images=tuple(images),
    )


def seeing_sequences(*, seed: int = 7) -> list[TrainSequence]:
    """Random sequences: some without an image, some with several, some showing the same one.

    The first three are samples of one prompt, whose image a fourth shows as well; one samples the
    placeholder; one shows an image after its first sampled tokens, as after a tool's answer.
    """
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, PLACEHOLDER) for _ in range(count)]

    wide, tall, other = picture(48, 24), picture(16, 40, seed=1), picture(48, 24, seed=2)
    prompt: list[Sequence[int] | Image] = [ids(5), wide, ids(6), tall, ids(3)]
    batch = [shown(prompt, ids(n), advantage=draw.gauss(0, 1)) for n in (7, 4, 12)]
    # The same ids, another image.
    batch.append(shown([prompt[0], other, *prompt[2:]], ids(5), advantage=draw.gauss(0, 1)))
    batch.append(shown([ids(2), tall], [*ids(3), PLACEHOLDER, *ids(4)], advantage=1.5))
    batch += [shown([ids(9)], ids(n), advantage=draw.gauss(0, 1)) for n in (6, 15)]
    batch.append(shown([ids(3), wide, ids(1), wide, ids(1)], ids(3), advantage=-0.5))
    late = shown([ids(4)], ids(5))
    after = shown([late.ids, ids(2), other, ids(2)], ids(6), advantage=0.7)
    mask = tuple(a or (t in range(4, 9)) for t, a in enumerate(after.loss_mask))
    batch.append(
        TrainSequence(
            ids=after.ids,
            loss_mask=mask,
            advantages=0.7,
            rollout_logprobs=after.rollout_logprobs,
            images=after.images,
        )
    )
    return batch


class Transformers:
    """A model and its image processor, called as transformers documents it."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Loads the image processor of the model's folder."""
        import transformers

        processors: Any = transformers.AutoImageProcessor
        self.model: Any = model
        self._processor: Any = processors.from_pretrained(folder, backend="pil")

    def logprobs(self, sequence: TrainSequence) -> torch.Tensor:
        """Returns the log-probabilities of ids 1, 2, ..., with a gradient."""
        ids = torch.tensor([sequence.ids])
        kinds = torch.zeros_like(ids)
        for placed in sequence.images:
            kinds[0, placed.start : placed.stop] = 1
        # A placeholder that is no image would be one to transformers: it gets the text's embedding.
        inputs: dict[str, Any] = {"inputs_embeds": self.model.get_input_embeddings()(ids)}
        extra: dict[str, Any] = {}
        model = self.model.model
        grids = None
        if sequence.images:
            opened = [PIL.Image.open(io.BytesIO(p.image.data)) for p in sequence.images]
            pixels = self._processor(images=opened, return_tensors="pt")
            grids = pixels["image_grid_thw"]
            found = model.get_image_features(pixels["pixel_values"], grids)
            seen = torch.cat(list(found.pooler_output))
            mask = kinds.bool()
            inputs["inputs_embeds"] = inputs["inputs_embeds"].masked_scatter(mask[..., None], seen)
            if "deepstack_features" in found:
                extra["visual_pos_masks"] = mask
                extra["deepstack_visual_embeds"] = [
                    torch.cat(list(level)) for level in found.deepstack_features
                ]
        positions, _ = model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
        hidden = model.language_model(
            **inputs, position_ids=positions, use_cache=False, **extra
        ).last_hidden_state
        logp = self.model.lm_head(hidden)[0, :-1].log_softmax(-1)
        return torch.as_tensor(logp.gather(-1, ids[0, 1:, None])[:, 0])
