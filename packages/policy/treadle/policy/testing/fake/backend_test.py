"""The fake backend keeps the contract: its models are those of transformers without layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from treadle.policy.config.choices import BackendName
from treadle.policy.testing.fake.description import MODEL_TYPES
from treadle.policy.testing.policy_contract import PolicyContract


class TestFakePolicy(PolicyContract):
    backend: ClassVar[BackendName] = "fake"
    sizes: ClassVar[Mapping[str, Any]] = {"num_hidden_layers": 0}
    models: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
        **{name: (name, {}) for name in MODEL_TYPES},
        "llama-untied": ("llama", {"tied": False}),
    }
    learned: ClassVar[float] = 0.9
    distance: ClassVar[float] = 0.02
    distillation_lr: ClassVar[float] = 1e-2
