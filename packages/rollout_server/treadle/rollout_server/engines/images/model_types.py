"""The models whose images are supported. Imports no library."""

import json
from pathlib import Path

VISION_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""Values of ``model_type`` whose images are supported."""


def takes_images(directory: Path) -> bool:
    """Returns whether the model in a directory takes images that we support."""
    config = json.loads((directory / "config.json").read_text())
    return config.get("model_type") in VISION_TYPES
