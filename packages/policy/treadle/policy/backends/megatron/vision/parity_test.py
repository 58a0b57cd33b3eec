"""Models that see against their classes in transformers: log-probabilities, weights, a step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
import transformers

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig
from treadle.policy.testing.seeing import (
    SEEING,
    Transformers,
    seeing_sequences,
    write_seeing_model,
)

# With eps = 1, Adam's step is about lr * g / (|g| + 1): parameters compare as gradients do.
CONFIG: Final = PolicyConfig(
    optimizer=OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0, weight_decay=0.0)
)
LOSS: Final = policy_loss(AlgorithmConfig())


@pytest.fixture
def opened() -> Iterator[list[MegatronPolicy]]:
    """Policies to be closed at the end; one at a time can be open in a process."""
    policies: list[MegatronPolicy] = []
    yield policies
    for policy in policies:
        policy.close()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("model_type", SEEING)
def test_a_model_is_that_of_transformers(
    tmp_path: Path, opened: list[MegatronPolicy], model_type: str, trained: bool
) -> None:
    """Log-probabilities, weights bit for bit, and the weights after a step of GRPO."""
    model = write_seeing_model(tmp_path / "model", model_type, tied=trained)
    reference = Transformers(tmp_path / "model", model)
    config = CONFIG.model_copy(update={"freeze_vision_tower": not trained})
    policy = MegatronPolicy(config, tmp_path / "model")
    opened.append(policy)
    batch = seeing_sequences()
    for sequence, got in zip(batch, policy.logprobs(batch), strict=True):
        with torch.no_grad():
            want = reference.logprobs(sequence) * torch.tensor(sequence.loss_mask[1:])
        assert got == pytest.approx([0.0, *want.tolist()], abs=2e-5)
    assert policy.architecture.num_parameters == sum(p.numel() for p in model.parameters())

    policy.save_hf(tmp_path / "saved")
    saved = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    wanted = model.state_dict()
    assert all(torch.equal(t, wanted[name]) for name, t in saved.state_dict().items())
    assert saved.state_dict().keys() == wanted.keys()

    total = sum(s.num_loss_tokens for s in batch)
    loss = torch.zeros(())
    model.requires_grad_(True)
    reference.model.model.visual.requires_grad_(trained)
    for s in batch:
        logp = reference.logprobs(s)
        mask = torch.tensor(s.loss_mask[1:])
        assert isinstance(s.advantages, float)
        loss = loss - ((logp - logp.detach()).exp() * s.advantages * mask).sum() / total
    loss.backward()
    learning = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(learning, CONFIG.optimizer.grad_clip)
    torch.optim.AdamW(learning, lr=0.05, eps=1.0, weight_decay=0.0).step()
    stats = policy.train_step(batch, LOSS)
    assert stats.loss == pytest.approx(loss.item(), abs=1e-6)
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    policy.save_hf(tmp_path / "stepped")
    stepped = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "stepped")
    for name, tensor in stepped.state_dict().items():
        assert (tensor - model.state_dict()[name]).abs().max() < 5e-6, name
