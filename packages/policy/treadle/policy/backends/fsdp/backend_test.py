"""The FSDP backend keeps the policy contract."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from treadle.policy.config.choices import BackendName
from treadle.policy.testing.layout_contract import Rounds, case
from treadle.policy.testing.policy_contract import PolicyContract

ROUNDS: Final[Rounds] = [
    [case("qwen2", data=2), case("llama-untied", context=2)],
    # One of the ranks has nothing to compute; positions fill a row up.
    [case("qwen2", lengths=(20,), data=2), case("qwen2", lengths=(21,), context=2)],
    [case("llama-untied", data=2), case("qwen3-untied", recompute="full", tensor=2)],
    [case("qwen3-untied", recompute="full", context=2, data=2, replicas=2)],
]


class TestFsdpPolicy(PolicyContract):
    backend: ClassVar[BackendName] = "fsdp"
    models: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
        **{name: (name, {}) for name in ("gemma2", "gemma3_text", "llama", "qwen3")},
        "llama-untied": ("llama", {"tied": False}),
    }
    adapted: ClassVar[tuple[str, ...]] = ("glm4", "gemma2")
    lora_layouts: ClassVar[tuple[tuple[Mapping[str, Any], ...], ...]] = (({"data": 2},),)
    critic_layouts: ClassVar[tuple[tuple[Mapping[str, Any], ...], ...]] = (
        ({"context": 2}, {"tensor": 2}),
    )
    offload_layouts: ClassVar[tuple[Mapping[str, Any], ...]] = ({"data": 2},)
    rounds: ClassVar[Rounds] = ROUNDS
    writers: ClassVar[Mapping[str, tuple[Mapping[str, Any], int]]] = {
        "folder": ({"data": 4, "replicas": 2}, 0)
    }
    readers: ClassVar[tuple[tuple[Mapping[str, Any], int], ...]] = (
        ({"data": 4, "replicas": 2}, 0),
        ({"tensor": 2}, 0),
    )

    def value_head(self, critic: Any) -> torch.Tensor:
        head: torch.Tensor = critic._net.value_weight
        return head
