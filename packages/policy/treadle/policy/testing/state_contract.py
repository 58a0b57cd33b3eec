"""The part of the policy contract about what is written and read: checkpoints and model folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backend import CheckpointError, CriticBackend, PolicyBackend
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.critic import CriticConfig, CriticOptimizerConfig
from treadle.policy.config.policy import OptimizerConfig
from treadle.policy.testing.contract_base import ContractBase, OpenPolicy
from treadle.policy.testing.critic_contract import LENGTHS, learn
from treadle.policy.testing.tiny import sequences

# Adam's second moment and the schedule both matter to the steps after loading.
SETTINGS: dict[str, Any] = {
    "optimizer": OptimizerConfig(lr=1e-2, eps=1e-3, schedule="linear", decay_steps=9),
    "micro_batch_tokens": 100,
}
LOSS = policy_loss(AlgorithmConfig())
CRITIC = CriticConfig(optimizer=CriticOptimizerConfig(lr=1e-3, eps=1e-3))


def go_on(policy: PolicyBackend, steps: int) -> list[tuple[float, ...]]:
    """Trains on a new batch in each step; returns the figures of each step."""
    stats = [policy.train_step(sequences(seed=policy.step), LOSS) for _ in range(steps)]
    return [(s.step, s.learning_rate, s.loss, s.grad_norm) for s in stats]


def learned(critic: CriticBackend, steps: int) -> list[tuple[float, ...]]:
    """Trains a critic; returns the figures of each step."""
    return [(s.step, s.loss, s.grad_norm) for s in learn(critic, steps)]


class StateContract(ContractBase):
    """See the module."""

    def test_resuming_gives_the_same_numbers_bit_for_bit(
        self, folder: Path, tmp_path: Path, open_policy: OpenPolicy, dtype: Any
    ) -> None:
        first = open_policy(folder, dtype=dtype, **SETTINGS)
        go_on(first, 2)
        first.save(tmp_path / "step_2")
        uninterrupted = go_on(first, 2)
        second = open_policy(folder, dtype=dtype, **SETTINGS)
        second.load(tmp_path / "step_2")
        assert go_on(second, 2) == uninterrupted
        assert [p.name for p in tmp_path.iterdir()] == ["step_2"]

    def test_a_checkpoint_may_be_written_before_the_first_step(
        self, folder: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        policy = open_policy(folder, **SETTINGS)
        policy.save(tmp_path / "start")
        want = go_on(policy, 2)
        policy.add_gradient(sequences(), LOSS)  # is of what was before the checkpoint
        policy.load(tmp_path / "start")
        assert policy.step == 0
        assert go_on(policy, 2) == want

    def test_weights_may_be_read_without_the_optimizer(
        self, folder: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        policy = open_policy(folder, **SETTINGS)
        go_on(policy, 2)
        policy.save(tmp_path / "step_2")
        policy.load(tmp_path / "step_2", weights_only=True)
        assert policy.step == 0
        want = go_on(policy, 2)
        policy.load(tmp_path / "step_2")
        assert go_on(policy, 2)[0][2:] != want[1][2:]  # the optimizer has moved meanwhile
        policy.load(tmp_path / "step_2", weights_only=True)
        assert go_on(policy, 2) == want

    def test_errors_name_the_checkpoint(
        self, folder: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        policy = open_policy(folder, **SETTINGS)
        policy.save(tmp_path / "a")
        with pytest.raises(CheckpointError, match="a exists"):
            policy.save(tmp_path / "a")
        with pytest.raises(CheckpointError, match="b holds no complete checkpoint"):
            policy.load(tmp_path / "b")
        with pytest.raises(CheckpointError, match=r"cannot write .*saved.*exists"):
            (tmp_path / "saved").mkdir()
            policy.save_hf(tmp_path / "saved")
        self.check_damaged(policy, tmp_path / "a")
        self.write(tmp_path / "other", hidden_size=96)
        other = open_policy(tmp_path / "other", **SETTINGS)
        with pytest.raises(CheckpointError, match="another model"):
            other.load(tmp_path / "a")

    def check_damaged(self, policy: PolicyBackend, directory: Path) -> None:
        """Damages copies of the backend's checkpoint, and checks that `load` refuses them."""

    def test_a_model_in_bfloat16_is_read_into_float32(
        self, folder: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        open_policy(folder).save_hf(tmp_path / "half")
        stored = load_file(tmp_path / "half" / "model.safetensors")
        half = {name: tensor.bfloat16() for name, tensor in stored.items()}
        save_file(half, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
        for item in open_policy(tmp_path / "half").export_weights():
            assert torch.equal(item.tensor, half[item.name].float()), item.name

    def test_weights_that_are_not_finite_are_never_loaded(
        self, folder: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        policy = open_policy(folder)
        assert policy.weights_are_finite()
        policy.save_hf(tmp_path / "hf")
        weights = load_file(tmp_path / "hf" / "model.safetensors")
        weights["model.norm.weight"][3] = torch.nan
        save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"hf: its weights are not finite"):
            open_policy(tmp_path / "hf")
        with pytest.raises(FileNotFoundError, match=r"no config.json"):
            open_policy(tmp_path)

    def test_a_resumed_critic_goes_on_bit_for_bit(
        self, folder: Path, tmp_path: Path, open_policy: OpenPolicy, dtype: Any
    ) -> None:
        self.needs("critic")
        policy = open_policy(folder, dtype=dtype)
        critic = policy.make_critic(CRITIC)
        learned(critic, 2)
        critic.save(tmp_path / "critic")
        policy.save(tmp_path / "policy")
        want = learned(critic, 2)
        critic = open_policy(folder, dtype=dtype).make_critic(CRITIC)
        critic.load(tmp_path / "critic")
        assert critic.step == 2
        assert learned(critic, 2) == want
        with pytest.raises(CheckpointError):
            critic.load(tmp_path / "policy")

    def test_policy_and_critic_do_not_touch_each_other(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        self.needs("critic")
        policy = open_policy(folder)
        critic = policy.make_critic(CRITIC)
        batch = sequences(LENGTHS)
        with pytest.raises(ValueError, match="5 of 5 sequences have no values"):
            critic.train_step(batch)
        learned(critic, 1)
        values, logprobs = critic.values(batch), policy.logprobs(batch)
        policy.train_step(batch, LOSS)
        assert critic.values(batch) == values
        assert policy.logprobs(batch) != logprobs
        logprobs = policy.logprobs(batch)
        learned(critic, 1)
        assert policy.logprobs(batch) == logprobs
        assert critic.values(batch) != values
