"""The guide in docs/losses.md: its loss is the paper's."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from treadle.policy.algorithms.choose_loss import check_loss, policy_loss
from treadle.policy.backend import LossInputs
from treadle.policy.config.algorithm import AlgorithmConfig

GUIDE = next(p for p in Path(__file__).parents if (p / "docs/losses.md").is_file())


def test_the_loss_of_the_guide(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (GUIDE / "docs/losses.md").read_text(), re.DOTALL)
    assert len(block.splitlines()) <= 20
    (tmp_path / "my_losses.py").write_text(block)
    config = AlgorithmConfig(loss=f"{tmp_path / 'my_losses.py'}:sapo", loss_args={"tau_neg": 1.1})
    check_loss(config)
    old, new, advantages = np.array([-1.0, -2.0]), np.array([-0.7, -2.5]), np.array([2.0, -1.0])
    inputs = LossInputs(
        logprobs_T=torch.tensor(new),
        entropy_T=torch.zeros(2),
        advantages_T=torch.tensor(advantages),
        old_logprobs_T=torch.tensor(old),
        rollout_logprobs_T=None,
        ref_logprobs_T=None,
        stale_T=torch.zeros(2, dtype=torch.bool),
        sample_lengths_S=torch.tensor([2]),
    )
    tau = np.array([1.0, 1.1])
    gate = 4 / tau / (1 + np.exp(-tau * (np.exp(new - old) - 1)))
    output = policy_loss(config)(inputs)
    assert output.loss_T.numpy() == pytest.approx(-advantages * gate, abs=1e-6)
    first = replace(inputs, logprobs_T=torch.tensor(old).requires_grad_())
    policy_loss(config)(first).loss_T.sum().backward()
    assert first.logprobs_T.grad is not None  # SAPO's gate has slope 1 where the ratio is 1
    assert first.logprobs_T.grad.numpy() == pytest.approx(-advantages, abs=1e-6)
