"""The Megatron backend keeps the contract of models that see; `layouts_test.py` has its layouts."""

from typing import ClassVar

from treadle.policy.config.choices import BackendName
from treadle.policy.testing.vision_contract import VisionContract


class TestMegatronVision(VisionContract):
    backend: ClassVar[BackendName] = "megatron"
