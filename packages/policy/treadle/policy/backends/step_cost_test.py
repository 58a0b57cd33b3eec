"""What a training step asks of a device, counted on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.policy.algorithms.losses import Gspo
from treadle.policy.backend import PolicyBackend, Rendezvous
from treadle.policy.backends import registry
from treadle.policy.config.choices import BackendName
from treadle.policy.config.policy import PolicyConfig
from treadle.policy.testing.kernels import Kernels, Waits, counted_forward
from treadle.policy.testing.tiny import sequences, write_model

LENGTHS = (20, 21, 22, 40, 41, 90, 95, 100)
"""In three groups of similar length, and in two micro-batches of 300 tokens."""
LOSS = Gspo(clip_low=0.2, clip_high=0.2)
IN_TRANSFORMERS = "masking_utils.py:find_packed_sequence_indices"
"""A wait in each forward pass of transformers' models, beside its masks; none in its layers."""


def opened(folder: Path, backend: BackendName) -> PolicyBackend:
    write_model(folder, "llama")
    config = PolicyConfig(backend=backend, dtype="bfloat16", micro_batch_tokens=300)
    policy = registry.build(config, folder, Rendezvous(), keep_reference=False, reference_path=None)
    policy.train_step(sequences(LENGTHS), LOSS)
    return policy


def test_a_layer_is_at_most_40_kernels(tmp_path: Path) -> None:
    policy: Any = opened(tmp_path, "megatron")
    try:
        with counted_forward(policy._model.decoder.layers[1]) as kernels:
            policy.logprobs(sequences(LENGTHS[:6]))
        assert kernels()["_scaled_dot_product_flash_attention_for_cpu"] == 3
        assert kernels().total() <= 40, kernels()
    finally:
        policy.close()


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_host_waits_once_in_a_step(tmp_path: Path, backend: BackendName) -> None:
    """For the norm of the gradient; then for statistics, when the update is under way."""
    policy: Any = opened(tmp_path, backend)
    try:
        if backend == "megatron":  # the update as a GPU has it
            policy._optimizer.fused, policy._optimizer.adam_steps = True, 1
        with Waits() as waits, Kernels() as kernels:
            policy.add_gradient(sequences(LENGTHS), LOSS)
        assert [place for place in waits.places if IN_TRANSFORMERS not in place] == []
        assert kernels.waits.total() == len(waits.places)
        with Waits() as waits:
            policy.optimizer_step()
        assert len(waits.places) == 1, waits.places
        assert "optimizer.py" in waits.places[0]
    finally:
        policy.close()


def test_a_fused_update_is_the_same_within_rounding(tmp_path: Path) -> None:
    policy: Any = opened(tmp_path, "megatron")
    try:
        policy.save(tmp_path / "saved")
        found = []
        for fused in (False, True):
            policy._optimizer.fused = fused
            policy.load(tmp_path / "saved")
            stats = policy.train_step(sequences(LENGTHS), LOSS)
            main = [tensor.clone() for tensor in policy._optimizer.adam_state]
            found.append((stats.grad_norm, main, policy._optimizer.adam_steps))
        (norm, plain, steps), (other_norm, fused_main, other_steps) = found
        assert (norm, steps) == (other_norm, other_steps) == (norm, 2)
        lr = policy._settings.lr
        for one, other in zip(plain, fused_main, strict=True):
            # An update is at most about lr; it is rounded once instead of several times.
            torch.testing.assert_close(one, other, atol=1e-5 * lr, rtol=2e-7)
    finally:
        policy.close()
