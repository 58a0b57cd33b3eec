"""The part of the policy contract about the model: it is that of transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.algorithms.losses import ClippedSurrogate
from treadle.policy.backend import PolicyBackend
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import LoraConfig, OptimizerConfig
from treadle.policy.testing.contract_base import LINEAR, ContractBase, OpenPolicy
from treadle.policy.testing.tiny import sequences


def wanted(
    reference: transformers.PreTrainedModel, sequence: TrainSequence, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities of ids 1, 2, ..., and whether each is trained on."""
    ids = torch.tensor(sequence.ids)
    logp = (reference(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
    return logp.gather(-1, ids[1:, None])[:, 0], torch.tensor(sequence.loss_mask[1:])


def assert_same_logprobs(
    reference: transformers.PreTrainedModel, policy: PolicyBackend, batch: Sequence[TrainSequence]
) -> None:
    """Checks the log-probabilities of a policy against those of transformers."""
    for sequence, got in zip(batch, policy.logprobs(batch), strict=True):
        with torch.no_grad():
            want, mask = wanted(reference, sequence)
        assert got == pytest.approx([0.0, *(want * mask).tolist()], abs=1e-5)


def step_in_torch(
    reference: transformers.PreTrainedModel, batch: Sequence[TrainSequence]
) -> tuple[float, float]:
    """Takes a step of GRPO and Adam in transformers and torch, one row per sequence."""
    total = sum(s.num_loss_tokens for s in batch)
    loss = torch.zeros(())
    for s in batch:
        logp, mask = wanted(reference, s)
        assert isinstance(s.advantages, float)
        loss = loss - ((logp - logp.detach()).exp() * s.advantages * mask).sum() / total
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), LINEAR.grad_clip)
    adam = torch.optim.AdamW(reference.parameters(), lr=LINEAR.lr, eps=LINEAR.eps, weight_decay=0.0)
    adam.step()
    return loss.item(), norm.item()


class ModelContract(ContractBase):
    """See the module."""

    def test_a_model_is_that_of_transformers(
        self, tmp_path: Path, open_policy: OpenPolicy, variant: str
    ) -> None:
        """Log-probabilities, weights bit for bit, and the weights after a step of GRPO."""
        model_type, settings = self.models[variant]
        reference = self.write(tmp_path / "model", model_type, **settings)
        policy = open_policy(tmp_path / "model", optimizer=LINEAR)
        batch = sequences()
        assert_same_logprobs(reference, policy, batch)
        self.check_model(policy, reference)

        originals: Mapping[str, Any] = reference.state_dict()
        exported = {item.name: item.tensor for item in policy.export_weights()}
        tied = {"lm_head.weight"} if reference.config.tie_word_embeddings else set()
        assert exported.keys() == originals.keys() - tied
        assert all(torch.equal(tensor, originals[name]) for name, tensor in exported.items())
        policy.save_hf(tmp_path / "saved")
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "saved", attn_implementation="eager"
        )
        ids = torch.tensor([batch[3].ids])
        with torch.no_grad():
            assert torch.equal(again(ids).logits, reference(ids).logits)

        loss, norm = step_in_torch(reference, batch)
        stats = policy.train_step(batch, policy_loss(AlgorithmConfig()))
        assert stats.loss == pytest.approx(loss, abs=1e-6)
        assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
        for item in policy.export_weights():
            assert (item.tensor - originals[item.name]).abs().max() < 2e-6, item.name

    def check_model(self, policy: PolicyBackend, reference: Any) -> None:
        """Checks more of a policy beside the model of transformers that it was read from."""

    def test_adapters_are_merged_into_what_transformers_reads(
        self, tmp_path: Path, open_policy: OpenPolicy, adapted_type: str
    ) -> None:
        self.write(tmp_path / "model", adapted_type)
        policy = open_policy(
            tmp_path / "model", keep_reference=True, optimizer=LINEAR, lora=LoraConfig(rank=4)
        )
        batch = sequences()
        before = policy.logprobs(batch)
        policy.train_step(batch, policy_loss(AlgorithmConfig()))
        after = policy.logprobs(batch)
        assert after != before
        assert policy.reference_logprobs(batch) == before
        policy.save_hf(tmp_path / "saved")
        policy.save(tmp_path / "checkpoint")
        merged = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "saved", attn_implementation="eager"
        )
        assert_same_logprobs(merged, policy, batch)
        policy.train_step(batch, policy_loss(AlgorithmConfig()))
        policy.load(tmp_path / "checkpoint")
        assert policy.logprobs(batch) == after

    def test_the_reference_may_be_another_model_of_another_size(
        self, tmp_path: Path, folder: Path, open_policy: OpenPolicy
    ) -> None:
        self.needs("other_reference")
        settings = {"num_hidden_layers": 2, **self.sizes, "hidden_size": 96}
        other = self.write(tmp_path / "other", "qwen3", tied=False, **settings)
        policy = open_policy(
            folder,
            keep_reference=True,
            reference_path=tmp_path / "other",
            optimizer=OptimizerConfig(lr=1e-2),
        )
        batch = sequences()
        before = policy.logprobs(batch)
        scores = policy.reference_logprobs(batch, temperature=0.7)
        for s, got in zip(batch, scores, strict=True):
            with torch.no_grad():
                want, mask = wanted(other, s, 0.7)
            assert got == pytest.approx([0.0, *(want * mask).tolist()], abs=1e-4)
        assert policy.logprobs(batch) == before
        policy.train_step(batch, ClippedSurrogate())
        assert policy.logprobs(batch) != before
        assert policy.reference_logprobs(batch, temperature=0.7) == scores
        self.check_reference(policy, tmp_path / "other")

    def check_reference(self, policy: PolicyBackend, folder: Path) -> None:
        """Checks more of a policy whose reference is the model of `folder`."""
