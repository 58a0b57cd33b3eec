"""Every loss over several updates of a batch: the same twice, and in other micro-batches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.policy.algorithms.choose_loss import BUILT_IN
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.testing.tiny import sequences, write_model
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig
from treadle.policy.rank.train_batch import run_update
from treadle.policy.v1 import training_service_pb2 as pb

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen2"
    write_model(path)
    return path


def update(
    folder: Path, algorithm: AlgorithmConfig, *, micro_batch_tokens: int
) -> tuple[pb.UpdateResponse, Weights]:
    """Trains on one batch: two epochs of two mini-batches, at rates that move the ratios."""
    batch = [replace(s, trajectory=0 if i < 2 else None) for i, s in enumerate(sequences())]
    # See parallel_test: with eps = 1 parameters compare as gradients do.
    optimizer = OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0)
    config = PolicyConfig(optimizer=optimizer, micro_batch_tokens=micro_batch_tokens)
    policy = MegatronPolicy(config, folder, keep_reference=algorithm.needs_reference)
    try:
        stats = run_update(policy, batch, algorithm, temperature=1.0)
        return stats, {t.name: t.tensor.clone() for t in policy.export_weights()}
    finally:
        policy.close()


@pytest.mark.parametrize("loss", [*BUILT_IN, "corrected"])
def test_a_run_is_repeated_bit_for_bit_and_micro_batches_do_not_change_it(
    folder: Path, loss: str
) -> None:
    settings: dict[str, Any] = {
        "loss": loss,
        "epochs": 2,
        "mini_batches": 2,
        "cov": {"ratio": 0.1, "clip_low": -1.0},
    }
    if loss == "corrected":
        correction = {"weights": "token", "reject": {"token_k1": [0.5, 2.0]}, "veto": 1e-4}
        settings |= {"loss": "ppo", "correction": correction, "kl_coef": 0.1, "entropy_coef": 0.01}
    if loss == "kl_cov":
        # Where a ratio is 1 but for rounding, the gradient of its |log ratio| has the sign of that.
        settings["old_logprobs"] = "rollout"
    algorithm = AlgorithmConfig.model_validate(settings)
    first, again, cut = (
        update(folder, algorithm, micro_batch_tokens=tokens) for tokens in (300, 300, 60)
    )
    assert [step.loss for step in first[0].steps] == [step.loss for step in again[0].steps]
    assert all(torch.equal(first[1][name], again[1][name]) for name in first[1])
    assert first[0].steps[0].num_micro_batches < cut[0].steps[0].num_micro_batches
    for step, other in zip(first[0].steps, cut[0].steps, strict=True):
        assert other.loss == pytest.approx(step.loss, abs=1e-5)
        # Of rounding alone where nothing is to learn yet: a distillation begins at its teacher.
        assert other.grad_norm == pytest.approx(step.grad_norm, rel=1e-4, abs=1e-6)
    assert max(float((first[1][n] - cut[1][n]).abs().max()) for n in first[1]) < 1e-5
