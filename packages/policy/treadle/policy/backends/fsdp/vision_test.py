"""The FSDP backend keeps the contract of models that see."""

from collections.abc import Mapping
from typing import Any, ClassVar

from treadle.policy.config.choices import BackendName
from treadle.policy.testing.vision_contract import VisionContract


class TestFsdpVision(VisionContract):
    backend: ClassVar[BackendName] = "fsdp"
    seeing_layouts: ClassVar[tuple[Mapping[str, Any], ...]] = ({"data": 2}, {"context": 2})
