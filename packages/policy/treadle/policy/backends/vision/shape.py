"""The vision tower of a model: settings of its config, and the number of its weights.

Invariant: a pure function of config.json. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from treadle.policy.backends.description import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The published files' names of the parts of a model that sees.

    Attributes:
        language: Beginning of the names of embedding, layers and final norm.
        tower: Beginning of the names of the tower's weights.
    """

    language: str
    tower: str


NAMING: Final[Mapping[str, Naming]] = MappingProxyType(
    {
        "qwen2_5_vl": Naming(language="model.", tower="visual."),
        "qwen3_vl": Naming(language="model.language_model.", tower="model.visual."),
    }
)
"""The model types that see, each with the names in its files."""

NOT_ADAPTED: Final = r".*\bvisual\b.*"
"""PEFT's pattern of the tower's modules."""
_NOT_OF_THE_TOWER: Final = ("transformers_version", "architectures", "dtype", "model_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The tower of one model, and how what it computes enters the language model.

    Attributes:
        placeholder: Id that stands for one embedding of an image.
        patch: Pixels of a patch, along each side.
        frames: Images that a patch is cut from; a still image is repeated.
        merge: Patches that an embedding is made of, along each side.
        deepstack: After how many first layers of the language model features are added to its rows;
            0 without DeepStack (arXiv:2406.04334).
        sections: Pairs of dimensions of a head that turn with time, height and width.
        interleaved: Whether neighbouring pairs turn with different axes, and not whole sections.
        config: The tower's settings for transformers, as JSON: what differs from the defaults.
    """

    placeholder: int
    patch: int
    frames: int
    merge: int
    deepstack: int
    sections: tuple[int, int, int]
    interleaved: bool
    config: str
    num_parameters: int

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> VisionShape | None:
        """Returns the tower of a transformers config; None of a model that reads text only."""
        if config.model_type not in NAMING:
            return None
        tower: Any = config.vision_config
        rope: Mapping[str, Any] = config.get_text_config().rope_parameters
        interleaved = config.model_type == "qwen3_vl"
        # The defaults of transformers' rotary embeddings.
        default = (24, 20, 20) if interleaved else (16, 24, 24)
        time, height, width = rope.get("mrope_section") or default
        settings = {k: v for k, v in tower.to_diff_dict().items() if k not in _NOT_OF_THE_TOWER}
        return cls(
            placeholder=config.image_token_id,
            patch=tower.patch_size,
            frames=tower.temporal_patch_size,
            merge=tower.spatial_merge_size,
            deepstack=len(getattr(tower, "deepstack_visual_indexes", ())),
            sections=(time, height, width),
            interleaved=interleaved,
            config=json.dumps(settings, sort_keys=True),
            num_parameters=_num_parameters(tower),
        )

    @property
    def reads(self) -> tuple[int, int, int, int]:
        """The settings that ids and pixels depend on: placeholder, patch, frames, merge."""
        return self.placeholder, self.patch, self.frames, self.merge

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis that each pair of dimensions turns with: 0 time, 1 height, 2 width."""
        time, height, width = self.sections
        if not self.interleaved:
            return (0,) * time + (1,) * height + (2,) * width
        axes = [0] * (time + height + width)
        for axis, size in ((1, height), (2, width)):
            axes[axis : 3 * size : 3] = [axis] * len(axes[axis : 3 * size : 3])
        return tuple(axes)


def check_reference(
    policy: str, sees: VisionShape | None, reference: str, other: VisionShape | None
) -> None:
    """Raises `UnsupportedModelError` if a reference cannot score what the policy has seen.

    Args:
        policy: Its model type, as `reference` is the other's.
    """
    if sees is not None and (other is None or other.reads != sees.reads):
        what = "sees no images" if other is None else "cuts images into other patches"
        raise UnsupportedModelError(
            f"algorithm.reference_path: {reference} {what}, and the policy, {policy}, is trained "
            "on images: choose a reference of its family"
        )


def _num_parameters(tower: Any) -> int:
    hidden, ffn, out = tower.hidden_size, tower.intermediate_size, tower.out_hidden_size
    merged = hidden * tower.spatial_merge_size**2
    patches = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2 * hidden
    attention = 4 * hidden * hidden + 4 * hidden
    merger = merged * merged + merged + merged * out + out
    if tower.model_type == "qwen2_5_vl_vision":
        # Norms without biases, and a gated feed-forward part.
        block = attention + 3 * hidden * ffn + 2 * ffn + hidden + 2 * hidden
        return int(patches + tower.depth * block + merger + hidden)
    block = attention + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    mergers = (merger + 2 * hidden) + len(tower.deepstack_visual_indexes) * (merger + 2 * merged)
    table = tower.num_position_embeddings * hidden
    return int(patches + hidden + table + tower.depth * block + mergers)
