"""Images in vLLM: its multimodal inputs, from images that `engines/images` has read.

Invariant: vLLM gets a prompt's ids as they are, with the places and the patches of its images. It
never runs its own processor: no id is added, removed or expanded.

vLLM builds its processor of a model's class in every process, with the tokenizer and for all kinds
of inputs. `VisionSetup` registers `SizesOnly` in its place, which gives the sizes of inputs. It
prepares the process in which it is created or unpickled, and travels in vLLM's configuration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BatchFeature
from vllm.inputs.engine import mm_input
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseProcessingInfo

from treadle.rollout_server.engines.common.missing_modules import torchvision_stand_in
from treadle.rollout_server.engines.images.inputs import ImageInput


@dataclass(frozen=True, slots=True)
class VisionSetup:
    """Prepares a process for a vision model, when it is created or unpickled there.

    Attributes:
        architecture: Architecture of the model, such as ``Qwen3VLForConditionalGeneration``.
        max_ids: Maximum number of placeholder ids of an image.
        merge_size: Placeholder ids stand for this number of patches in each direction.
        patch_values: Number of values of a patch.
    """

    architecture: str
    max_ids: int
    merge_size: int
    patch_values: int

    def __post_init__(self) -> None:
        with torchvision_stand_in():
            model = ModelRegistry.models[self.architecture].load_model_cls()
        delattr(model, "_processor_factory")  # vLLM warns of one that is replaced.
        # vLLM would inspect the class in a process that is not prepared.
        ModelRegistry.register_model(self.architecture, model)
        MULTIMODAL_REGISTRY.register_processor(
            lambda info, _: SizesOnly(info, self),
            info=lambda ctx: _Sizes(ctx, self.max_ids),
            dummy_inputs=lambda _: None,
        )(model)

    def __reduce__(self) -> tuple[type["VisionSetup"], tuple[Any, ...]]:
        values = (self.architecture, self.max_ids, self.merge_size, self.patch_values)
        return VisionSetup, values

    def compute_hash(self) -> str:
        """Names this part of vLLM's configuration in its caches of compiled code."""
        return repr(self)


class _Sizes(BaseProcessingInfo):  # type: ignore[misc]
    """Gives vLLM the limits of its inputs, without a processor of transformers."""

    def __init__(self, ctx: Any, max_ids: int) -> None:
        super().__init__(ctx)
        self._max_ids = max_ids

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of images, nothing else."""
        return {"image": None}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Maximum number of ids of an image that fits the context."""
        return {"image": min(self._max_ids, seq_len)}


class SizesOnly:
    """Replaces vLLM's processor of a model; see the module docstring."""

    def __init__(self, info: _Sizes, setup: VisionSetup) -> None:
        self.info = info
        self._setup = setup

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> Mapping[str, Any]:
        """Returns the largest image, by which vLLM measures the memory of a vision tower."""
        setup = self._setup
        length = self.info.ctx.model_config.max_model_len
        num_ids = self.info.get_mm_max_tokens_per_item(length, mm_counts)["image"]
        rows = int(num_ids**0.5)
        columns = num_ids // rows
        grid_thw = (1, rows * setup.merge_size, columns * setup.merge_size)
        patches = torch.zeros(grid_thw[1] * grid_thw[2], setup.patch_values)
        return {
            "prompt_token_ids": [0] * num_ids,
            "mm_kwargs": {"image": [_item(patches, grid_thw)]},
            "mm_placeholders": {"image": [PlaceholderRange(offset=0, length=rows * columns)]},
        }


def image_prompt(prompt: Sequence[int], images: Sequence[ImageInput], *, cache_salt: str) -> Any:
    """Returns vLLM's input for a prompt with images.

    Args:
        prompt: The ids, with the placeholders of the images.
        cache_salt: Part of the keys under which vLLM caches prefixes and embeddings.
    """
    return mm_input(
        list(prompt),
        MultiModalKwargsItems({"image": [_item(one.patches, one.grid_thw) for one in images]}),
        # vLLM keeps embeddings under this name, also after new weights of the tower.
        {"image": [f"{cache_salt} image {one.placed.image.serial}" for one in images]},
        {
            "image": [
                PlaceholderRange(offset=one.placed.start, length=one.placed.stop - one.placed.start)
                for one in images
            ]
        },
        cache_salt=cache_salt,
    )


def _item(patches: torch.Tensor, grid_thw: tuple[int, int, int]) -> MultiModalKwargsItem:
    grid = torch.tensor([grid_thw])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    inputs = BatchFeature({"pixel_values": patches, "image_grid_thw": grid})
    (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
    return item
