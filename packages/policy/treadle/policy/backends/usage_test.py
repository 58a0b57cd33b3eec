from pathlib import Path
from typing import Any

import pytest

from treadle.policy.algorithms.losses import ClippedSurrogate
from treadle.policy.backend import Rendezvous
from treadle.policy.backends import registry
from treadle.policy.backends.usage import ModelWork, needed_flops, peak_flops, step_usage
from treadle.policy.config.choices import BackendName
from treadle.policy.config.policy import PolicyConfig
from treadle.policy.testing.tiny import sequences, write_model


def test_the_arithmetic_by_hand() -> None:
    work = ModelWork(weights=1000.0, head=500.0, heads=8, windows={None: 2, 4: 1})
    products = 3 * 2 * (1000 * 13 + 500 * 5)
    of_all = 10 * 10 / 2 + 3 * 3 / 2
    of_window = 4 * (10 - 2) + 3 * 3 / 2
    attention = 3 * 4 * 8 * (2 * of_all + of_window)
    assert work.flops([10, 3], 5) == products + attention


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989)],
)
def test_the_peak_of_a_card(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12
    assert peak_flops("Some GPU") is None


@pytest.mark.parametrize("model", ["llama", "gemma2", "qwen3_moe"])
def test_backends_agree_on_the_work_and_a_step_has_a_rate(tmp_path: Path, model: str) -> None:
    write_model(tmp_path, model)
    found = []
    backends: tuple[BackendName, ...] = ("megatron", "fsdp")
    for backend in backends:
        policy: Any = registry.build(
            PolicyConfig(backend=backend),
            tmp_path,
            Rendezvous(),
            keep_reference=False,
            reference_path=None,
        )
        try:
            step = policy.train_step(sequences(), ClippedSurrogate())
            usage = step_usage(policy, sequences(), step)
            assert usage == {"policy/tokens_per_second": step.num_tokens / step.time_s}
            held = policy.held_bytes()
            assert held["optimizer"] >= 2 * held["parameters"] * 0.9
            found.append((policy.work(), needed_flops(policy.work(), sequences(), step)))
        finally:
            policy.close()
    (ours, flops), (other, other_flops) = found
    assert ours == other
    assert flops == other_flops > 0
